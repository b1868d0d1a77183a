-- Messages that failed permanently; they wait for an operator (redrive or prune).
CREATE TABLE pgoutbox.message_failed PARTITION OF pgoutbox.message (
    CONSTRAINT message_failed_pkey PRIMARY KEY (id),
    CONSTRAINT message_failed_sound CHECK (
        finished_at IS NOT NULL AND key_in_flight IS NULL AND attempt_count > 0 AND skip_reason IS NULL
    )
) FOR VALUES IN ('failed');

CREATE INDEX message_failed_halts ON pgoutbox.message_failed (queue, ordering_key, id)
WHERE halts_key;

-- Maintenance asks by key whether a message is left that a redrive can make pending again. Only failed and cancelled
-- messages are in these indexes, so that enqueue, claim and a finish as sent never write them.
CREATE INDEX message_failed_coalesced ON pgoutbox.message_failed (topic, coalesce_key)
WHERE coalesce_key IS NOT NULL;

CREATE INDEX message_failed_ordered ON pgoutbox.message_failed (queue, ordering_key)
WHERE ordering_key IS NOT NULL;

-- Monitoring counts the messages that failed within the last hour. With the state, which all queries name, a chart of the
-- failures reads only the index.
CREATE INDEX message_failed_finished_at ON pgoutbox.message_failed (finished_at) INCLUDE (state);
