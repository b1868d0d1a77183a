-- The newest message of each coalesce key, which supersedes the older ones, and the last one of each ordering key.
--
-- A message has at most one of the two keys. An enqueue locks its row here. If the row has a greater id than the message,
-- another one is drawn under the lock, so the ids of a key have the order of the commits. A bulk updates many narrow rows:
-- free space on every page keeps the updates on the page (HOT).
CREATE TABLE pgoutbox.key_head (
    newest_id     bigint NOT NULL, -- The newest committed message of the key.
    replaced_id   bigint, -- The newest message of the key before the last enqueue.
    -- When the first message of the current wait was enqueued, if newer ones can postpone it only for a limited time.
    waiting_since timestamptz,
    scope         text COLLATE "C" NOT NULL, -- The topic of a coalesce key; a slash and the queue of an ordering key.
    key           text COLLATE "C" NOT NULL, -- The key.
    CONSTRAINT key_head_pkey PRIMARY KEY (scope, key),
    CONSTRAINT key_head_sound CHECK (key <> '')
) WITH (fillfactor = 70);
