-- Due messages of a queue without an ordering key that may begin or end now. The including statement adds the
-- conditions of its lane, an order, a limit and row locks.
-- An attempt begins (`sending`), or the message ends: `cancelled`, or `skipped` because it is superseded or expired.
SELECT m.ctid AS place, m.id, m.topic, m.coalesce_key AS key, head.newest_id AS newer_id,
    CASE
        -- A transaction has cancelled it while it was in flight, or while its row was locked.
        WHEN EXISTS (
            SELECT FROM pgoutbox.cancel_request AS c WHERE c.message_id = m.id AND c.message_created_at = m.created_at
        ) THEN 'cancelled'
        WHEN head.newest_id IS NOT NULL OR m.expires_at <= now() THEN 'skipped'
        ELSE 'sending'
    END AS state
-- The partition message_live holds only pending and sending messages. Finished messages never slow down a claim.
FROM pgoutbox.message_live AS m
-- The newer message of the same key that supersedes this one.
LEFT JOIN pgoutbox.key_head AS head
    ON head.scope = m.topic AND head.key = m.coalesce_key AND head.newest_id > m.id
-- The message of the same key in flight; an ordering key is another key, even with the same text. With LIMIT,
-- PostgreSQL looks it up by its key; otherwise it may read all attempts in flight.
LEFT JOIN LATERAL (
    SELECT s.id FROM pgoutbox.message_live AS s
    WHERE s.topic = m.topic AND s.key_in_flight = m.coalesce_key AND s.ordering_key IS NULL LIMIT 1
) AS sibling ON true
-- now() can be an index condition; clock_timestamp(), which is volatile, cannot.
WHERE m.queue = %(queue)s::text AND m.ordering_key IS NULL AND m.available_at <= now() AND m.state = 'pending'
    AND m.topic = ANY (%(topics)s::text[])
    -- Two messages of a key are never in flight: this one waits for its sibling. It ends at once only if it is
    -- superseded; one that is cancelled or has expired waits too, which delays nobody.
    AND (sibling.id IS NULL OR head.newest_id IS NOT NULL)
