-- Pauses of topics. A topic without a row is not paused.
--
-- Claims leave out the messages of paused topics, in all queues. A pause that has passed its end does not count.
CREATE TABLE pgoutbox.topic_pause (
    paused_at timestamptz NOT NULL DEFAULT now(), -- Start of the pause.
    resume_at timestamptz, -- Automatic end of the pause; null: an operator must resume the topic.
    topic     text COLLATE "C" PRIMARY KEY, -- The topic whose messages no worker claims, in any queue.
    CONSTRAINT topic_pause_sound CHECK (
        length(topic) <= 63
        AND topic ~ '^[a-z][a-z0-9_.-]*$'
        -- Python reads no other times.
        AND paused_at BETWEEN timestamptz '2000-01-01 00:00Z' AND timestamptz '3000-01-01 00:00Z'
        AND resume_at BETWEEN timestamptz '2000-01-01 00:00Z' AND timestamptz '3000-01-01 00:00Z'
    )
);
