-- Cancel a message by its id, or by its topic and key, in the caller's transaction. Parameters that are not used are
-- null.
SELECT target.id, pgoutbox.cancel(target.id)
FROM (SELECT %s::pg_catalog.int8 AS id) AS target
WHERE target.id IS NOT NULL
UNION ALL
SELECT r.id, r.result
FROM pgoutbox.cancel_by_key(
    topic => %s::pg_catalog.text,
    coalesce_key => %s::pg_catalog.text,
    dedupe_key => %s::pg_catalog.text
) AS r
