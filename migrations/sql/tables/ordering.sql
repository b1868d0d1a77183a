CREATE TABLE pgoutbox.ordering (
    last_id      bigint NOT NULL,
    queue        text COLLATE "C" NOT NULL,
    ordering_key text COLLATE "C" NOT NULL,
    CONSTRAINT ordering_pkey PRIMARY KEY (queue, ordering_key),
    CONSTRAINT ordering_sound CHECK (ordering_key <> '')
) WITH (fillfactor = 70);

COMMENT ON TABLE pgoutbox.ordering IS
    'The last message of each queue and ordering key; locked while enqueue draws the next id.';
COMMENT ON COLUMN pgoutbox.ordering.last_id IS 'The last message of the key.';
COMMENT ON COLUMN pgoutbox.ordering.queue IS 'The queue.';
COMMENT ON COLUMN pgoutbox.ordering.ordering_key IS 'The key.';
