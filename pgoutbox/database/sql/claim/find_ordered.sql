-- One page of a round over all ordering keys of a queue: from `after_key` on, at most `key_limit` keys. One row: the
-- claimable messages, the last key of the page, and its number of keys. claim_ordered.sql claims the messages.
-- The round leaps from key to key along an index and reads only the first message of each key, whatever the number of
-- messages behind it.
WITH RECURSIVE visited(ordering_key, number) AS (
    SELECT %(after_key)s::text COLLATE "C", 0
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
    \ir _first_is_claimable.sql
), max(v.ordering_key), count(*)
FROM visited AS v
\ir _first_of_key.sql
WHERE v.number > 0
