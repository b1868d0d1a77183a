-- ENQUEUE that waits at most a second for a lock, or less if the caller's lock_timeout is shorter. The caller's setting is
-- restored at the end; after an error, the rollback to the savepoint restores it.
WITH caller AS MATERIALIZED (
    SELECT pg_catalog.current_setting('lock_timeout') AS lock_timeout
),
-- Materialized: the setting is read before it changes, and changes before the function runs.
bounded AS MATERIALIZED (
    SELECT
        caller.lock_timeout,
        pg_catalog.set_config(
            'lock_timeout',
            CASE
                WHEN caller.lock_timeout::pg_catalog.interval OPERATOR(pg_catalog.>) '0'::pg_catalog.interval
                    AND caller.lock_timeout::pg_catalog.interval OPERATOR(pg_catalog.<) '1s'::pg_catalog.interval
                    THEN caller.lock_timeout
                ELSE '1s'
            END,
            true
        )
    FROM caller
)
SELECT
    pg_catalog.abs(r.receipt) AS id,
    r.receipt OPERATOR(pg_catalog.<) 0 AS duplicate,
    CASE WHEN r.receipt OPERATOR(pg_catalog.<) 0 THEN pgoutbox._state_of(pg_catalog.abs(r.receipt)) END AS state
FROM (
    SELECT
        bounded.lock_timeout,
        pgoutbox._enqueue_receipt(
            \ir _receipt.sql
        ) AS receipt
    FROM bounded
) AS r
CROSS JOIN LATERAL pg_catalog.set_config('lock_timeout', r.lock_timeout, true)
