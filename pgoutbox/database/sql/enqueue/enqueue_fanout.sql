-- Enqueue one message for each destination in the caller's transaction, with one shared content.
SELECT r.item_index, r.id
FROM pgoutbox.enqueue_fanout(
    message => %s::pg_catalog.text::pg_catalog.jsonb,
    destinations => %s::pg_catalog.text::pg_catalog.jsonb,
    content => %s::pg_catalog.text::pg_catalog.jsonb,
    notify => %s::pg_catalog.bool
) AS r
