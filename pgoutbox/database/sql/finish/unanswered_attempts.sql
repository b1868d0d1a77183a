-- Attempts of this worker whose claim was not answered. Such a row has the worker's name, and its claim time lies
-- between those of the answered claims before and after it (`after` and `before`; null for no bound).
SELECT m.id, m.attempt_count
FROM pgoutbox.message_live AS m
WHERE m.queue = ANY (%(queues)s::text[])
    AND m.state = 'sending'
    AND m.worker = %(worker)s::text
    AND m.claimed_at > coalesce(%(after)s::timestamptz, '-infinity')
    AND m.claimed_at < coalesce(%(before)s::timestamptz, 'infinity')
