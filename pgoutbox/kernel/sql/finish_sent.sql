-- Finish attempts as sent: the common outcome, without the locks and the decision of finish.sql. It writes the
-- messages that the attempts still hold.
UPDATE pgoutbox.message AS m
SET state = 'sent',
    finished_at = now(),
    key_in_flight = NULL
WHERE m.id = ANY (%(ids)s::bigint[])
    -- The fence: in flight, in an attempt of this worker with this number, and in one of these claims. A worker knows all
    -- attempts of a claim, and a batch names only the last one that it knows of each message.
    AND m.state = 'sending'
    AND m.worker = %(worker)s::text
    AND m.attempt_count = %(attempt_count)s::integer
    AND m.claimed_at = ANY (%(claimed_ats)s::timestamptz[])
    -- A locked row fails the batch, and the worker uses finish.sql, which skips it. Set once, before the first row.
    AND (SELECT set_config('lock_timeout', '20ms', true)) IS NOT NULL
