-- Every attempt in flight, with the end of its lease.
--
-- The definition of a message in flight. It starts from the claims, which are few. With OFFSET 0 it does so under any
-- statistics, and never reads the backlog.
CREATE VIEW pgoutbox.in_flight_view AS
SELECT m.id, m.topic, c.queue, m.attempt_count, c.worker, c.claimed_at, c.lease_expires_at
FROM pgoutbox.claim AS c
CROSS JOIN LATERAL (
    SELECT begun.id, begun.topic, begun.attempt_count
    FROM pgoutbox.message_live AS begun
    WHERE begun.id = ANY (c.ids)
        AND begun.state = 'sending'
        AND begun.worker = c.worker
        AND begun.claimed_at = c.claimed_at
    OFFSET 0
) AS m;
