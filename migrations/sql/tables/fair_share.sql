-- The shares of fair keys. The row of a queue without a key has the shares of its other keys, and where the last round ended.
--
-- A message with a fair key waits in lane 2 until it gets its turn: see _give_turns.
CREATE TABLE pgoutbox.fair_share (
    spent_at      timestamptz, -- When the rate of the key permits a whole turn again.
    weight        integer, -- Messages of a turn. Null: that of the queue, or 1.
    max_in_flight integer, -- Most messages that have their turn and have not ended. Null: that of the queue, or no limit.
    rate_count    integer, -- Most messages that get their turn in `rate_seconds`, spread over them. Null: that of the queue.
    rate_seconds  integer, -- See `rate_count`.
    queue         text COLLATE "C" NOT NULL, -- The queue of the messages.
    fair_key      text COLLATE "C" NOT NULL DEFAULT '', -- The key; empty: all keys of the queue without a row.
    after_key     text COLLATE "C" NOT NULL DEFAULT '', -- The key that had the last turn.
    CONSTRAINT fair_share_pkey PRIMARY KEY (queue, fair_key),
    CONSTRAINT fair_share_sound CHECK (
        length(queue) <= 63
        AND queue ~ '^[a-z][a-z0-9_.-]*$'
        AND octet_length(fair_key) <= 512
        AND weight BETWEEN 1 AND 1000
        AND max_in_flight BETWEEN 0 AND 1000000
        AND rate_count BETWEEN 1 AND 1000000
        AND rate_seconds BETWEEN 1 AND 2592000
        AND (rate_count IS NULL) = (rate_seconds IS NULL)
    )
);

-- Own shares, and not the many rows that only remember when a rate is spent.
CREATE INDEX fair_share_own ON pgoutbox.fair_share (queue, fair_key)
WHERE num_nonnulls(weight, max_in_flight, rate_count) > 0;
