-- Finished messages: sent, skipped, cancelled. Partitioned by time for retention.
CREATE TABLE pgoutbox.message_done PARTITION OF pgoutbox.message (
    CONSTRAINT message_done_pkey PRIMARY KEY (id, finished_at),
    CONSTRAINT message_done_sound CHECK (
        key_in_flight IS NULL
        AND (state <> 'sent' OR (attempt_count > 0 AND worker IS NOT NULL AND claimed_at IS NOT NULL))
        AND (state = 'skipped') = (skip_reason IS NOT NULL)
        AND (superseded_by IS NULL OR (state = 'skipped' AND superseded_by > id))
    )
) FOR VALUES IN ('sent', 'skipped', 'cancelled')
PARTITION BY RANGE (finished_at);

CREATE TABLE pgoutbox.message_done_default PARTITION OF pgoutbox.message_done DEFAULT;

-- Block ranges are enough for retention, which reads old rows in bulk, and cost a finish almost nothing.
CREATE INDEX message_done_finished_at ON pgoutbox.message_done USING brin (finished_at);

CREATE INDEX message_done_coalesced ON pgoutbox.message_done (topic, coalesce_key)
WHERE state = 'cancelled' AND coalesce_key IS NOT NULL;

CREATE INDEX message_done_ordered ON pgoutbox.message_done (queue, ordering_key)
WHERE state = 'cancelled' AND ordering_key IS NOT NULL;
