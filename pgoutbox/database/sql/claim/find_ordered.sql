-- One page of a round over all ordering keys of a queue: from `after_key` on, at most `key_limit` keys. One row: the
-- claimable messages, the last key of the page, and its number of keys. claim_ordered.sql claims the messages.
-- The round leaps from key to key along an index and reads only the first message of each key, whatever the number of
-- messages behind it. find_new_ordered.sql has the same conditions.
WITH RECURSIVE visited(ordering_key, number) AS (
    SELECT first.ordering_key, 1
    FROM (
        SELECT m.ordering_key
        FROM pgoutbox.message_live AS m
        WHERE m.queue = %(queue)s::text AND m.ordering_key > %(after_key)s::text COLLATE "C"
        ORDER BY m.ordering_key
        LIMIT 1
    ) AS first
    UNION ALL
    SELECT next.ordering_key, v.number + 1
    FROM visited AS v
    CROSS JOIN LATERAL (
        SELECT m.ordering_key
        FROM pgoutbox.message_live AS m
        WHERE m.queue = %(queue)s::text AND m.ordering_key > v.ordering_key
        ORDER BY m.ordering_key
        LIMIT 1
    ) AS next
    WHERE v.number < %(key_limit)s::integer
)
SELECT array_agg(first.id) FILTER (WHERE
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
), max(v.ordering_key), count(*)
FROM visited AS v
CROSS JOIN LATERAL (
    SELECT m.id, m.topic, m.available_at
    FROM pgoutbox.message_live AS m
    WHERE m.queue = %(queue)s::text AND m.ordering_key = v.ordering_key
    ORDER BY m.id
    LIMIT 1
) AS first
