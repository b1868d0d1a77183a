-- Cancel all messages of an owner or to a destination in the caller's transaction.
SELECT r.id, r.result
FROM pgoutbox.cancel_all(
    owner => %s::pg_catalog.text,
    destination => %s::pg_catalog.text,
    topic => %s::pg_catalog.text
) AS r
