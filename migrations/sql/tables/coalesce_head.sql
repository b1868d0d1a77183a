-- A bulk updates many narrow rows: free space on every page keeps the updates on the page (HOT).
CREATE TABLE pgoutbox.coalesce_head (
    newest_id     bigint NOT NULL,
    replaced_id   bigint,
    waiting_since timestamptz,
    topic         text COLLATE "C" NOT NULL,
    coalesce_key  text COLLATE "C" NOT NULL,
    CONSTRAINT coalesce_head_pkey PRIMARY KEY (topic, coalesce_key),
    CONSTRAINT coalesce_head_sound CHECK (coalesce_key <> '')
) WITH (fillfactor = 70);

COMMENT ON TABLE pgoutbox.coalesce_head IS
    'The newest message of each topic and coalesce key. Older messages are superseded.';
COMMENT ON COLUMN pgoutbox.coalesce_head.newest_id IS 'The newest committed message of the key.';
COMMENT ON COLUMN pgoutbox.coalesce_head.replaced_id IS 'The newest message of the key before that one.';
COMMENT ON COLUMN pgoutbox.coalesce_head.waiting_since IS
    'When the first message of the current wait was enqueued with a max_delay.';
COMMENT ON COLUMN pgoutbox.coalesce_head.topic IS 'The topic.';
COMMENT ON COLUMN pgoutbox.coalesce_head.coalesce_key IS 'The key.';
