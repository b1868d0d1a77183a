-- Due messages of a queue without an ordering key that may begin now, or that end because they are superseded. The
-- including statement adds the conditions of its lane, an order, a limit and row locks.
-- A coalesce key has one of two rules. `newest` (coalesces_pending is null): a producer locks the row of the key in
-- pgoutbox.coalesce_head, which names the newest message; older messages are superseded. `pending` (coalesces_pending
-- is true): a producer locks nothing; of the due messages that a claim finds, the newest one supersedes the others.
SELECT m.ctid AS place, m.id, m.topic, m.coalesce_key, m.coalesces_pending, m.expires_at, head.newest_id
-- The partition message_live holds only pending and sending messages. Finished messages never slow down a claim.
FROM pgoutbox.message_live AS m
-- The head of a key of the rule `newest`. coalesces_pending is never false, and null without a key.
LEFT JOIN pgoutbox.coalesce_head AS head
    ON head.topic = m.topic AND head.coalesce_key = m.coalesce_key AND m.coalesces_pending IS NOT TRUE
-- The message of the same key in flight. With LIMIT, PostgreSQL looks it up by its key; otherwise it may read all
-- attempts in flight.
LEFT JOIN LATERAL (
    SELECT s.id FROM pgoutbox.message_live AS s
    WHERE s.topic = m.topic AND s.coalesce_key = m.coalesce_key AND s.state = 'sending' LIMIT 1
) AS sibling ON true
-- now() can be an index condition; clock_timestamp(), which is volatile, cannot.
WHERE m.queue = %(queue)s::text AND m.ordering_key IS NULL AND m.available_at <= now()
    AND m.topic = ANY (%(topics)s::text[])
    -- Whether the message may begin or end now; the first true condition decides.
    AND CASE
        WHEN m.coalesce_key IS NULL THEN true
        -- A superseded message ends, even while another message of its key is in flight.
        WHEN head.newest_id > m.id THEN true
        WHEN m.coalesces_pending IS TRUE AND pgoutbox._newer_pending(m.topic, m.coalesce_key, m.queue, m.id) IS NOT NULL
            THEN true
        -- Two messages of a key are never in flight: this one waits for its sibling.
        WHEN sibling.id IS NOT NULL THEN false
        -- A message of the rule `pending` also waits for a due one of the rule `newest`. If this claim began both, the
        -- unique index message_live_in_flight would refuse the whole claim, and the worker would have to repeat it.
        WHEN m.coalesces_pending THEN NOT pgoutbox._newest_is_due(m.topic, m.coalesce_key, m.queue)
        ELSE true
    END
