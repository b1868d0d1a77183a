-- The queues that have or had a limit or a pause, with their messages in flight.
--
-- With `now()`, messages in flight are counted only if the query uses the column. A volatile column is always computed.
CREATE VIEW pgoutbox.queue_view AS
SELECT
    q.name,
    q.paused_at IS NOT NULL AND (q.resume_at > now()) IS NOT FALSE AS is_paused,
    q.paused_at,
    q.resume_at,
    q.rate_count,
    q.rate_seconds,
    q.burst,
    rate.tokens,
    rate.next_at AS next_token_at,
    q.max_in_flight,
    q.ceiling_count,
    q.ceiling_seconds,
    (
        SELECT count(*)
        FROM pgoutbox.in_flight_view AS v
        WHERE v.queue = q.name AND v.lease_expires_at > now()
    ) AS in_flight
FROM pgoutbox.queue AS q
CROSS JOIN LATERAL pgoutbox._tokens_of(q) AS rate;
