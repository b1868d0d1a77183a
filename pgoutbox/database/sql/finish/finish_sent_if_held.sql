-- Finish attempts as sent. The hot path of a worker. It also deletes claims whose attempts had ended before.
-- Returns the messages that the attempts still held.
WITH ended AS (
    \ir _ended_claims.sql
)
UPDATE pgoutbox.message AS m
-- The table is partitioned by state: the row moves from message_live, which holds pending and sending messages, to the
-- partition of finished ones.
SET state = 'sent',
    finished_at = now(),
    key_in_flight = NULL
WHERE m.id = ANY (%(ids)s::bigint[])
    -- The fence of a batch: the attempts have one number and one worker, and `claimed_ats` are the times of their claims.
    -- A worker that knows a claim knows all of its attempts, and a batch names only the last attempt that it knows of each
    -- message. So no row belongs to the claim of another message of the batch.
    AND m.state = 'sending'
    AND m.worker = %(worker)s::text
    AND m.attempt_count = %(attempt_count)s::integer
    AND m.claimed_at = ANY (%(claimed_ats)s::timestamptz[])
    -- While its lease runs, only this worker writes a message in flight. If a session has locked its row for another reason, this statement
    -- fails after the lock timeout, and the worker uses finish_if_held.sql, which skips such a row. As a subquery it is
    -- set once, before the first row, until the end of this transaction.
    AND (SELECT set_config('lock_timeout', %(lock_timeout)s::text, true)) IS NOT NULL
RETURNING m.id
