-- The `limit` queues that need a look first, among up to `queues` names that begin with `prefix`; the number of these names,
-- and the time of their oldest due message. Queues whose oldest due message waits for longest come first.
\ir _live_queue_names.sql
SELECT l.queue, count(*) OVER () AS queue_count, min(first.oldest_at) OVER () AS oldest_due_at
FROM (
    SELECT named.queue, now() AS until_at, 1 AS rows
    FROM named
    WHERE named.number > 0
) AS l
CROSS JOIN LATERAL (
    SELECT min(m.available_at) AS oldest_at
    FROM (
        \ir ../doctor/_pending.sql
    ) AS m
) AS first
ORDER BY first.oldest_at, l.queue
LIMIT %(limit)s::bigint
