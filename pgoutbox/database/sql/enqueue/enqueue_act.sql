-- Enqueue one message as an act of an operator. Otherwise this is ENQUEUE.
SELECT
    pg_catalog.abs(r.receipt) AS id,
    r.receipt OPERATOR(pg_catalog.<) 0 AS duplicate,
    CASE WHEN r.receipt OPERATOR(pg_catalog.<) 0 THEN pgoutbox._state_of(pg_catalog.abs(r.receipt)) END AS state
FROM (
    SELECT pgoutbox._enqueue_act(
        \ir _receipt.sql
    ) AS receipt
) AS r
