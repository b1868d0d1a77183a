-- Finish attempts as sent. The hot path of a worker: all attempts of one statement have the same `attempt_count`.
-- Returns the messages that the attempts still held.
-- The fence is the state, the attempt count and the worker. The count alone is not enough: a failover that loses
-- commits gives the same attempt number out a second time, to another worker.
UPDATE pgoutbox.message AS m
-- The table is partitioned by state: the row moves from message_live, which holds pending and sending messages, to the
-- partition of finished ones.
SET state = 'sent',
    finished_at = now(),
    lease_expires_at = NULL
WHERE m.id = ANY (%(ids)s::bigint[])
    AND m.state = 'sending'
    AND m.attempt_count = %(attempt_count)s::integer
    AND m.worker = %(worker)s::text
    -- Another transaction may hold a row's lock until its end, for example to cancel the message. After 20 ms this
    -- statement fails, and the worker uses finish_if_held.sql, which skips such a row. The limit is short because this
    -- statement keeps its own row locks meanwhile. As a subquery it is set once, before the first row, until the end of
    -- this transaction.
    AND (SELECT set_config('lock_timeout', '20ms', true)) IS NOT NULL
RETURNING m.id
