-- A message has at most one of the two keys. An enqueue locks its row here. If the row has a greater id than the message,
-- another one is drawn under the lock, so the ids of a key have the order of the commits. A bulk updates many narrow rows:
-- free space on every page keeps the updates on the page (HOT).
CREATE TABLE pgoutbox.key_head (
    newest_id     bigint NOT NULL,
    replaced_id   bigint,
    waiting_since timestamptz,
    scope         text COLLATE "C" NOT NULL,
    key           text COLLATE "C" NOT NULL,
    CONSTRAINT key_head_pkey PRIMARY KEY (scope, key),
    CONSTRAINT key_head_sound CHECK (key <> '')
) WITH (fillfactor = 70);

COMMENT ON TABLE pgoutbox.key_head IS
    'The newest message of each coalesce key, which supersedes the older ones, and the last one of each ordering key.';
COMMENT ON COLUMN pgoutbox.key_head.newest_id IS 'The newest committed message of the key.';
COMMENT ON COLUMN pgoutbox.key_head.replaced_id IS 'The newest message of the key before the last enqueue.';
COMMENT ON COLUMN pgoutbox.key_head.waiting_since IS
    'When the first message of the current wait was enqueued, if newer ones can postpone it only for a limited time.';
COMMENT ON COLUMN pgoutbox.key_head.scope IS
    'The topic of a coalesce key; a slash and the queue of an ordering key.';
COMMENT ON COLUMN pgoutbox.key_head.key IS 'The key.';
