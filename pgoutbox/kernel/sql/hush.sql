-- Release the wake-up locks of these queues, which this session has: their producers notify no longer. It stays on watch.
SELECT pg_advisory_unlock(1885826146, hashtext(q.queue))
FROM unnest(%(queues)s::text[]) AS q(queue)
