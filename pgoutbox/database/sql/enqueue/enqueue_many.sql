-- Enqueue a JSON array of messages in the caller's transaction. One row of two texts: the ids in the order of the
-- items, and the positions of the duplicates, each with the state of the message that was found.
SELECT
    pg_catalog.string_agg(r.id::pg_catalog.text, ',' ORDER BY r.item_index),
    pg_catalog.string_agg(
        pg_catalog.concat(r.item_index, ':', pgoutbox._state_of(r.id)), ','
    ) FILTER (WHERE r.duplicate)
FROM pgoutbox.enqueue_many(
    messages => %s::pg_catalog.text::pg_catalog.jsonb,
    notify => %s::pg_catalog.bool
) AS r
