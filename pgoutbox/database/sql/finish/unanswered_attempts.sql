-- Attempts of this worker whose claim may not have been answered: they have its name, and are younger than its last
-- answered claim (`after`; null if there is none). Without that time, an attempt whose outcome a failover has lost would
-- look the same: its handler has run, so it must count as lost.
SELECT m.id, m.attempt_count
FROM pgoutbox.message_live AS m
WHERE m.queue = ANY (%(queues)s::text[])
    AND m.state = 'sending'
    AND m.worker = %(worker)s::text
    AND m.claimed_at > coalesce(%(after)s::timestamptz, '-infinity')
