-- Finish attempts as sent: the common outcome, without the locks and the decision of finish.sql. It writes the
-- messages that the attempts still hold.
UPDATE pgoutbox.message AS m
SET state = 'sent',
    finished_at = now(),
    key_in_flight = NULL
WHERE m.id = ANY (%(ids)s::bigint[])
    -- The fence: in flight, in an attempt of this worker with this number, and in one of these claims. It need not be
    -- the claim of this very message: a worker knows all attempts of its claims, and a batch names the last one of each
    -- message. So a row in one of these claims is in the attempt that the batch names.
    AND m.state = 'sending'
    AND m.worker = %(worker)s::text
    AND m.attempt_count = %(attempt_count)s::integer
    AND m.claimed_at = ANY (%(claimed_ats)s::timestamptz[])
    -- A locked row fails the trip, and the worker uses finish.sql, which skips it. Short, because all ends of the trip
    -- wait. Set once, before the first row, and for the rest of the trip: its claim waits for a key no longer either.
    AND (SELECT set_config('lock_timeout', '20ms', true)) IS NOT NULL
