-- The queues that are paused or have limits. A pause after its end does not count.
SELECT
    q.name,
    q.paused_at,
    q.resume_at,
    q.rate_count,
    q.rate_seconds,
    q.burst,
    q.tokens,
    q.max_in_flight,
    q.ceiling_count,
    q.ceiling_seconds,
    q.in_flight
FROM pgoutbox.queue_view AS q
WHERE q.is_paused OR num_nonnulls(q.rate_count, q.max_in_flight) > 0
ORDER BY q.name
