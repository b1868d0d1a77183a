-- Schedules: messages that are enqueued again and again, by a rule of times.
--
-- A worker whose outbox knows schedules computes the next time. At that time one transaction enqueues the message and writes
-- the time after it. Of many workers the first one does: the others find another time.
CREATE TABLE pgoutbox.schedule (
    next_at         timestamptz, -- The next time; null: a worker has to compute it, as the first one after changed_at.
    retry_at        timestamptz, -- When a worker looks again at a schedule with a problem.
    last_at         timestamptz, -- The last time whose message was enqueued.
    last_message_id bigint, -- That message.
    until_at        timestamptz, -- No message is enqueued for a later time.
    paused_at       timestamptz, -- Start of the pause. Times in a pause pass.
    -- The last change, or the end of the last pause; a time of the former rule that was due then.
    changed_at      timestamptz   NOT NULL DEFAULT now(),
    ended_at        timestamptz, -- When a worker has found that no time is left.
    revision        integer       NOT NULL DEFAULT 1, -- Grows with each change: a worker may know an older rule.
    is_declared     boolean       NOT NULL DEFAULT false, -- Belongs to the code of workers: only those that have it use it.
    jitter          interval      NOT NULL DEFAULT '0', -- Each message waits for a part of it, which depends on the name.
    name            text COLLATE "C" PRIMARY KEY, -- Name of the schedule.
    -- Five fields of cron in the time zone, or `every` and a number of seconds, counted from 1970.
    rule            text          NOT NULL,
    timezone        text          NOT NULL DEFAULT 'UTC', -- Name of the time zone.
    -- Times that passed while no worker ran: latest enqueues the last one, all each of them up to 100, none those of the last
    -- minute.
    missed          text          NOT NULL DEFAULT 'latest',
    problem         text, -- Why its last times could not be computed or enqueued; null: none.
    message         jsonb         NOT NULL, -- An item of enqueue_many, without its keys of one time.
    CONSTRAINT schedule_sound CHECK (
        length(name) <= 63
        AND name ~ '^[a-z][a-z0-9_.-]*$'
        AND length(rule) <= 200
        AND missed IN ('latest', 'all', 'none')
        AND jitter BETWEEN interval '0' AND interval '1 day'
        -- Python reads no other times.
        AND next_at BETWEEN timestamptz '2000-01-01 00:00Z' AND timestamptz '3000-01-01 00:00Z'
        AND until_at BETWEEN timestamptz '2000-01-01 00:00Z' AND timestamptz '3000-01-01 00:00Z'
    )
);

-- When to look at each.
CREATE INDEX schedule_next ON pgoutbox.schedule (coalesce(retry_at, next_at) NULLS FIRST)
WHERE paused_at IS NULL AND ended_at IS NULL;
