-- ENQUEUE that waits at most a second for a locked table. A key that another transaction is enqueuing is waited for, as
-- by ENQUEUE: if that one rolls back, nobody else enqueues this message.
-- Materialized: the locks are taken before the function runs.
WITH locked AS MATERIALIZED (
    SELECT pgoutbox.lock_for_enqueue()
)
SELECT
    pg_catalog.abs(r.receipt) AS id,
    r.receipt OPERATOR(pg_catalog.<) 0 AS duplicate,
    CASE WHEN r.receipt OPERATOR(pg_catalog.<) 0 THEN pgoutbox._state_of(pg_catalog.abs(r.receipt)) END AS state
FROM (
    SELECT pgoutbox._enqueue_receipt(
        \ir _receipt.sql
    ) AS receipt
    FROM locked
) AS r
