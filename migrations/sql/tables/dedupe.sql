CREATE TABLE pgoutbox.dedupe (
    message_id     bigint      NOT NULL,
    created_at     timestamptz NOT NULL DEFAULT now(),
    is_kept        boolean     NOT NULL DEFAULT false,
    topic          text COLLATE "C" NOT NULL,
    dedupe_key     text COLLATE "C" NOT NULL,
    payload_digest bytea       NOT NULL,
    owner          text COLLATE "C",
    CONSTRAINT dedupe_pkey PRIMARY KEY (topic, dedupe_key),
    CONSTRAINT dedupe_sound CHECK (dedupe_key <> '')
);
CREATE INDEX dedupe_owner ON pgoutbox.dedupe (owner) WHERE owner IS NOT NULL;

COMMENT ON TABLE pgoutbox.dedupe IS 'The message of each topic and dedupe key.';
COMMENT ON COLUMN pgoutbox.dedupe.message_id IS
    'The message with this key. If it is cancelled, skipped or deleted, the next message takes the key.';
COMMENT ON COLUMN pgoutbox.dedupe.created_at IS 'When that message was enqueued.';
COMMENT ON COLUMN pgoutbox.dedupe.is_kept IS
    'The message was deleted as it was sent, so a repetition of it is still a duplicate.';
COMMENT ON COLUMN pgoutbox.dedupe.topic IS 'The topic.';
COMMENT ON COLUMN pgoutbox.dedupe.dedupe_key IS 'The key.';
COMMENT ON COLUMN pgoutbox.dedupe.payload_digest IS
    'SHA-256 of the payload, or of the digest in an encrypted one. It tells a repeated message from a different one '
    'with the same key.';
COMMENT ON COLUMN pgoutbox.dedupe.owner IS
    'The owner of the message, if the key is kept. erase needs it.';
