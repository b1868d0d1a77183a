-- Messages that are pending or sending.
--
-- A claim writes a new version of the row. Most of each page is left free for these versions: on the same page,
-- PostgreSQL logs only the change, and elsewhere the whole row and a lock of the old version (docs/decisions/0024).
--
-- Each partition has one CHECK for its states. PostgreSQL prepares the CHECKs of a table again for every statement:
-- eight of them on the parent made a single enqueue two and a half times as expensive (docs/decisions/0001).
CREATE TABLE pgoutbox.message_live PARTITION OF pgoutbox.message (
    CONSTRAINT message_live_pkey PRIMARY KEY (id),
    CONSTRAINT message_live_sound CHECK (
        CASE state
            WHEN 'pending'
                THEN key_in_flight IS NULL AND attempt_count < max_attempts
                    AND (lane = least(attempt_count, 1) OR (lane = 2 AND fair_key IS NOT NULL))
            ELSE claimed_at IS NOT NULL AND worker IS NOT NULL AND attempt_count > 0
                AND key_in_flight IS NOT DISTINCT FROM coalesce(coalesce_key, ordering_key)
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
    fillfactor = 45,
    autovacuum_vacuum_threshold = 2000,
    autovacuum_vacuum_scale_factor = 0.02,
    autovacuum_vacuum_insert_scale_factor = 0.2,
    autovacuum_analyze_threshold = 5000,
    autovacuum_analyze_scale_factor = 0.1,
    autovacuum_vacuum_cost_delay = 1
);

-- A claim changes no column of an index, except the key of a message that has one. So its new version of the row needs
-- no index entries (heap-only tuple, docs/decisions/0043). Fresh messages and retries are read from different indexes, so
-- that a backlog of one never delays the other.
CREATE INDEX message_live_lane ON pgoutbox.message_live (queue, lane, available_at, id)
WHERE ordering_key IS NULL;

-- The guard of "two are never in flight at once": whatever the snapshots of two claims, only one of them can commit.
CREATE UNIQUE INDEX message_live_in_flight ON pgoutbox.message_live (topic, key_in_flight)
WHERE key_in_flight IS NOT NULL AND ordering_key IS NULL;

-- Messages with an ordering key have their own lane. A claim reads only the first message of each key, and none of the
-- messages behind it.
CREATE INDEX message_live_ordered ON pgoutbox.message_live (queue, ordering_key, id)
WHERE ordering_key IS NOT NULL;

-- The second condition is always true. Because of it, only statements that repeat it use this index: the planner never
-- looks up the messages of a key in it. PostgreSQL 19 leaves out a condition NOT NULL, so it is another one.
CREATE INDEX message_live_ordered_due ON pgoutbox.message_live (queue, available_at)
WHERE ordering_key IS NOT NULL AND available_at > '-infinity';

CREATE UNIQUE INDEX message_live_ordered_in_flight ON pgoutbox.message_live (queue, key_in_flight)
WHERE key_in_flight IS NOT NULL AND ordering_key IS NOT NULL;

-- Those that wait for their turn, and those that have got it: pending or in flight.
CREATE INDEX message_live_waiting ON pgoutbox.message_live (queue, fair_key, available_at, id)
WHERE fair_key IS NOT NULL AND lane = 2;

CREATE INDEX message_live_admitted ON pgoutbox.message_live (queue, fair_key)
WHERE fair_key IS NOT NULL AND lane < 2;
