-- Cancel the messages of a topic and key; one row per message with the result.
SELECT r.id, r.result
FROM pgoutbox.cancel_by_key(
    topic => %(topic)s::text,
    coalesce_key => %(coalesce_key)s::text,
    dedupe_key => %(dedupe_key)s::text
) AS r
