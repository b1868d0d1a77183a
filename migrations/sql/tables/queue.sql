-- Settings of a queue. A queue without a row has no limits.
CREATE TABLE pgoutbox.queue (
    name            text COLLATE "C" PRIMARY KEY, -- The name in the column queue of messages.
    paused_at       timestamptz, -- Start of the pause; null: the queue is not paused.
    resume_at       timestamptz, -- Automatic end of the pause; null: an operator must resume the queue.
    tokens_at       timestamptz, -- Time at which tokens was computed.
    begun_count     bigint      NOT NULL DEFAULT 0, -- Number of attempts that have begun while the queue had a rate.
    rate_seconds    double precision, -- Length of the period in which rate_count attempts may begin.
    tokens          double precision, -- Tokens in the bucket at tokens_at. Each claim takes its tokens before it sends.
    -- Largest number of attempts that may begin in any period, in the whole fleet. Null: unlimited.
    rate_count      integer,
    -- Capacity of the bucket: the number of attempts that may begin at once after an idle time; at least those of a
    -- second.
    burst           integer,
    max_in_flight   integer, -- Number of attempts that may be in flight at once, in the whole fleet. Null: unlimited.
    -- Largest number of attempts that may begin in any ceiling_seconds, whatever rate operators set. Null: no ceiling.
    -- Only the owner of the schema changes it.
    ceiling_count   integer,
    ceiling_seconds double precision, -- Length of the period of ceiling_count.
    -- Tokens that are added to the bucket.
    tokens_per_second double precision GENERATED ALWAYS AS (rate_count / nullif(rate_seconds, 0)) STORED,
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
