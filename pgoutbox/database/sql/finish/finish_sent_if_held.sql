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
    \ir _fence.sql
    -- While its lease runs, only this worker writes a message in flight. If a session has locked its row for another reason, this statement
    -- fails after the lock timeout, and the worker uses finish_if_held.sql, which skips such a row. As a subquery it is
    -- set once, before the first row, until the end of this transaction.
    AND (SELECT set_config('lock_timeout', %(lock_timeout)s::text, true)) IS NOT NULL
RETURNING m.id
