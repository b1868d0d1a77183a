-- The due messages of these queues, at most 10,000 of each. A run counts what it has left in queues that it does not serve.
SELECT asked.queue, due.messages
FROM unnest(%(queues)s::text[]) AS asked(queue)
CROSS JOIN LATERAL (
    SELECT count(*) AS messages
    FROM (
        SELECT
        FROM pgoutbox.message_live AS m
        WHERE m.queue = asked.queue AND m.state = 'pending' AND m.available_at <= now()
        LIMIT 10000
    ) AS found
) AS due
WHERE due.messages > 0
ORDER BY asked.queue
