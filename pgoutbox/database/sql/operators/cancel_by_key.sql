-- Cancel the messages of a topic and key. One row per message, like `pgoutbox.act_result`.
SELECT r.id, r.result, NULL AS state, NULL AS other_id
FROM pgoutbox.cancel_by_key(
    topic => %(topic)s::text,
    coalesce_key => %(coalesce_key)s::text,
    dedupe_key => %(dedupe_key)s::text
) AS r
