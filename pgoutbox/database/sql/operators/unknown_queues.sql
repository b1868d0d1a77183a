-- Those of the queues that have neither messages nor controls, to warn about a wrong name. This stops at the first
-- message of a known queue; known_queues.sql reads every message.
SELECT asked.queue
FROM unnest(%(queues)s::text[]) AS asked(queue)
WHERE NOT EXISTS (SELECT FROM pgoutbox.queue_view AS q WHERE q.name = asked.queue)
    AND NOT EXISTS (SELECT FROM pgoutbox.message_view AS m WHERE m.queue = asked.queue)
ORDER BY asked.queue
