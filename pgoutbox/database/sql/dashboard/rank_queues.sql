-- The queues that need a look first: up to `queues` names that begin with `prefix`, with the due time of their oldest due
-- message. Those whose oldest due message waits for longest come first.
\ir _live_queue_names.sql
SELECT
    l.queue,
    first.oldest_at AS oldest_due_at,
    extract(epoch FROM now() - first.oldest_at)::float8 AS oldest_seconds
FROM (
    SELECT named.queue, now() AS until_at, 1 AS rows
    FROM named
) AS l
CROSS JOIN LATERAL (
    SELECT min(m.available_at) AS oldest_at
    FROM (
        \ir ../doctor/_pending.sql
    ) AS m
) AS first
ORDER BY first.oldest_at, l.queue
