-- The claimable messages of the ordering keys of up to `key_limit` messages beyond `floor_id`, so that new messages do
-- not wait until a round over many keys reaches theirs. find_ordered.sql, with the same conditions, finds all other
-- messages.
WITH new AS MATERIALIZED (
    SELECT m.ordering_key
    FROM pgoutbox.message_live AS m
    WHERE m.queue = %(queue)s::text AND m.ordering_key IS NOT NULL AND m.id > %(floor_id)s::bigint
    ORDER BY m.id
    LIMIT %(key_limit)s::integer
)
SELECT first.id
FROM (SELECT DISTINCT n.ordering_key FROM new AS n) AS v
CROSS JOIN LATERAL (
    SELECT m.id, m.topic, m.available_at
    FROM pgoutbox.message_live AS m
    WHERE m.queue = %(queue)s::text AND m.ordering_key = v.ordering_key
    ORDER BY m.id
    LIMIT 1
) AS first
WHERE
    first.available_at <= now()
    AND first.topic = ANY (%(topics)s::text[])
    -- No other message of the key is in flight.
    AND NOT EXISTS (
        SELECT FROM pgoutbox.message_live AS sibling
        WHERE sibling.queue = %(queue)s::text AND sibling.ordering_key = v.ordering_key AND sibling.state = 'sending'
    )
    -- No failed message before it halts the key.
    AND NOT EXISTS (
        SELECT FROM pgoutbox.message_failed AS f
        WHERE f.queue = %(queue)s::text AND f.ordering_key = v.ordering_key AND f.on_failed = 'halt' AND f.id < first.id
    )
