-- Enqueue one message in the caller's transaction. The parameters are positional because drivers of several kinds run
-- this statement.
-- Statements on the caller's connection do not trust its search_path: types and operators are qualified too.
SELECT
    pg_catalog.abs(r.receipt) AS id,
    r.receipt OPERATOR(pg_catalog.<) 0 AS duplicate,
    CASE WHEN r.receipt OPERATOR(pg_catalog.<) 0 THEN pgoutbox._state_of(pg_catalog.abs(r.receipt)) END AS state
FROM (
    SELECT pgoutbox._enqueue_receipt(
        \ir _receipt.sql
    ) AS receipt
) AS r
