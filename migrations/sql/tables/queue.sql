CREATE TABLE pgoutbox.queue (
    name            text COLLATE "C" NOT NULL,
    paused_at       timestamptz,
    resume_at       timestamptz,
    tokens_at       timestamptz,
    begun_count     bigint      NOT NULL DEFAULT 0,
    rate_seconds    double precision,
    tokens          double precision,
    rate_count      integer,
    burst           integer,
    max_in_flight   integer,
    ceiling_count   integer,
    ceiling_seconds double precision,
    tokens_per_second double precision GENERATED ALWAYS AS (rate_count / nullif(rate_seconds, 0)) STORED,
    CONSTRAINT queue_pkey PRIMARY KEY (name),
    CONSTRAINT queue_sound CHECK (
        length(name) <= 63
        AND name ~ '^[a-z][a-z0-9_.-]*$'
        AND (resume_at IS NULL OR paused_at IS NOT NULL)
        -- Python reads no other times.
        AND paused_at BETWEEN timestamptz '2000-01-01 00:00Z' AND timestamptz '3000-01-01 00:00Z'
        AND resume_at BETWEEN timestamptz '2000-01-01 00:00Z' AND timestamptz '3000-01-01 00:00Z'
        AND tokens_at BETWEEN timestamptz '2000-01-01 00:00Z' AND timestamptz '3000-01-01 00:00Z'
        AND num_nulls(rate_count, rate_seconds, burst, tokens, tokens_at) IN (0, 5)
        AND rate_count BETWEEN 1 AND 1000000
        AND rate_seconds BETWEEN 0.001 AND 2592000
        AND burst BETWEEN 1 AND rate_count
        AND tokens BETWEEN 0 AND burst
        AND max_in_flight BETWEEN 1 AND 1000000
        AND num_nulls(ceiling_count, ceiling_seconds) IN (0, 2)
        AND ceiling_count BETWEEN 1 AND 1000000
        AND ceiling_seconds BETWEEN 0.001 AND 2592000
    )
);

COMMENT ON TABLE pgoutbox.queue IS 'Settings of a queue. A queue without a row has no limits.';
COMMENT ON COLUMN pgoutbox.queue.name IS 'The name in the column queue of messages.';
COMMENT ON COLUMN pgoutbox.queue.paused_at IS 'Start of the pause; null: the queue is not paused.';
COMMENT ON COLUMN pgoutbox.queue.resume_at IS 'Automatic end of the pause; null: an operator must resume the queue.';
COMMENT ON COLUMN pgoutbox.queue.tokens_at IS 'Time at which tokens was computed.';
COMMENT ON COLUMN pgoutbox.queue.begun_count IS 'Number of attempts that have begun while the queue had a rate.';
COMMENT ON COLUMN pgoutbox.queue.rate_seconds IS 'Length of the period in which rate_count attempts may begin.';
COMMENT ON COLUMN pgoutbox.queue.tokens IS
    'Tokens in the bucket at tokens_at. Each claim takes its tokens before it sends.';
COMMENT ON COLUMN pgoutbox.queue.rate_count IS
    'Largest number of attempts that may begin in any period, in the whole fleet. Null: unlimited.';
COMMENT ON COLUMN pgoutbox.queue.burst IS
    'Capacity of the bucket: the number of attempts that may begin at once after an idle time; at least those of a second.';
COMMENT ON COLUMN pgoutbox.queue.max_in_flight IS
    'Number of attempts that may be in flight at once, in the whole fleet. Null: unlimited.';
COMMENT ON COLUMN pgoutbox.queue.ceiling_count IS
    'Largest number of attempts that may begin in any ceiling_seconds, whatever rate operators set. Null: no ceiling. '
    'Only the owner of the schema changes it.';
COMMENT ON COLUMN pgoutbox.queue.ceiling_seconds IS 'Length of the period of ceiling_count.';
COMMENT ON COLUMN pgoutbox.queue.tokens_per_second IS 'Tokens that are added to the bucket.';
