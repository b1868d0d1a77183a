-- A claim writes a new version of the row. Half of each page is left free for these versions: on the same page,
-- PostgreSQL logs only the change, and elsewhere the whole row and a lock of the old version (docs/decisions/0024).
--
-- Each partition has one CHECK for its states. PostgreSQL prepares the CHECKs of a table again for every statement:
-- eight of them on the parent made a single enqueue two and a half times as expensive (docs/decisions/0001).
CREATE TABLE pgoutbox.message_live PARTITION OF pgoutbox.message (
    CONSTRAINT message_live_pkey PRIMARY KEY (id),
    CONSTRAINT message_live_sound CHECK (
        CASE state
            WHEN 'pending'
                THEN lease_expires_at IS NULL AND cancel_requested_at IS NULL AND attempt_count < max_attempts
            ELSE lease_expires_at IS NOT NULL AND claimed_at IS NOT NULL AND worker IS NOT NULL AND attempt_count > 0
        END
        AND finished_at IS NULL
        AND attempt_count >= 0
        AND max_attempts > 0
        AND attempt_budget > 0
        AND created_at BETWEEN '2000-01-01 00:00Z' AND '9000-01-01 00:00Z'
        AND available_at BETWEEN '2000-01-01 00:00Z' AND '9000-01-01 00:00Z'
    )
) FOR VALUES IN ('pending', 'sending')
WITH (
    fillfactor = 50,
    autovacuum_vacuum_threshold = 2000,
    autovacuum_vacuum_scale_factor = 0.02,
    autovacuum_vacuum_insert_scale_factor = 0.2,
    autovacuum_analyze_threshold = 5000,
    autovacuum_analyze_scale_factor = 0.1,
    autovacuum_vacuum_cost_delay = 1
);

-- The three lanes of a claim. Fresh messages, retries and messages in flight are read from different indexes, so that a
-- backlog of one never delays another.
CREATE INDEX message_live_fresh ON pgoutbox.message_live (queue, available_at, id)
WHERE attempt_count = 0 AND ordering_key IS NULL;

CREATE INDEX message_live_retry ON pgoutbox.message_live (queue, available_at, id)
WHERE attempt_count > 0 AND state = 'pending' AND ordering_key IS NULL;

-- A message in `sending` is due again when its lease ends: recovery needs only this index. Its condition is the lease
-- and not the state: with the state, the planner could use it for a finish instead of the primary key.
CREATE INDEX message_live_lease ON pgoutbox.message_live (queue, lease_expires_at, id)
WHERE lease_expires_at IS NOT NULL;

-- The guard of "two are never in flight at once": whatever the snapshots of two claims, only one of them can commit.
CREATE UNIQUE INDEX message_live_in_flight ON pgoutbox.message_live (topic, coalesce_key)
WHERE state = 'sending' AND coalesce_key IS NOT NULL;

-- Messages with an ordering key have their own lane. A claim reads only the first message of each key, and none of the
-- messages behind it.
CREATE INDEX message_live_ordered ON pgoutbox.message_live (queue, ordering_key, id)
WHERE ordering_key IS NOT NULL;

CREATE INDEX message_live_ordered_due ON pgoutbox.message_live (queue, available_at)
WHERE ordering_key IS NOT NULL AND state = 'pending';

CREATE UNIQUE INDEX message_live_ordered_in_flight ON pgoutbox.message_live (queue, ordering_key)
WHERE ordering_key IS NOT NULL AND state = 'sending';

COMMENT ON TABLE pgoutbox.message_live IS 'Messages that are pending or sending.';
