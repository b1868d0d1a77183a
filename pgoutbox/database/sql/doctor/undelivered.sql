-- Messages of the given queues that were due for the first time longer than `seconds` ago, and are still undelivered, by
-- queue: whatever their due time now. A message that was attempted counts from its first attempt. Of each lane of a queue
-- the messages that are due first are read; the queues share `rows`.
SELECT
    u.queue,
    count(*) AS messages,
    bool_or(u.is_capped) AS is_capped,
    extract(epoch FROM now() - min(u.due_at))::float8 AS oldest_seconds,
    (array_agg(u.id ORDER BY u.due_at, u.id))[1] AS oldest_id
FROM (
    SELECT l.queue, one.id, one.due_at, l.until_at, count(*) OVER (PARTITION BY l.queue, one.part) >= l.rows AS is_capped
    FROM (
        SELECT
            named.queue,
            now() - make_interval(secs => %(seconds)s::float8) AS until_at,
            greatest(5, %(rows)s::bigint / count(*) OVER ()) AS rows
        FROM unnest(%(names)s::text[]) AS named(queue)
    ) AS l
    CROSS JOIN LATERAL (
        (
            SELECT 0 AS part, m.id, m.available_at AS due_at
            FROM pgoutbox.message_view AS m
            WHERE m.queue = l.queue AND m.lane = 0 AND m.state = 'pending' AND m.ordering_key IS NULL
                AND m.available_at < l.until_at
            ORDER BY m.available_at LIMIT l.rows
        )
        UNION ALL
        (
            SELECT 1, m.id, m.first_attempt_at
            FROM pgoutbox.message_view AS m
            WHERE m.queue = l.queue AND m.lane = 1 AND m.state IN ('pending', 'sending') AND m.ordering_key IS NULL
            ORDER BY m.available_at LIMIT l.rows
        )
        UNION ALL
        (
            SELECT 2, m.id, CASE WHEN m.lane = 0 THEN m.available_at ELSE m.first_attempt_at END
            FROM pgoutbox.message_view AS m
            WHERE m.queue = l.queue AND m.ordering_key IS NOT NULL AND m.state IN ('pending', 'sending')
                -- Always true: it permits the index message_live_ordered_due.
                AND m.available_at > '-infinity'
            ORDER BY m.available_at LIMIT l.rows
        )
    ) AS one
) AS u
WHERE u.due_at < u.until_at
GROUP BY u.queue
ORDER BY oldest_seconds DESC
LIMIT 50
