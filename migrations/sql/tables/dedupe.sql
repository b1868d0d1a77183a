-- The message of each topic and dedupe key.
CREATE TABLE pgoutbox.dedupe (
    -- The message with this key. If it is cancelled, skipped or deleted, the next message takes the key.
    message_id     bigint      NOT NULL,
    created_at     timestamptz NOT NULL DEFAULT now(), -- When that message was enqueued.
    payload_version smallint   NOT NULL DEFAULT 1, -- The version of the payload that the digest is of.
    -- The message was deleted as it was sent, so a repetition of it is still a duplicate.
    is_kept        boolean     NOT NULL DEFAULT false,
    topic          text COLLATE "C" NOT NULL, -- The topic.
    dedupe_key     text COLLATE "C" NOT NULL, -- The key.
    -- SHA-256 of the payload, or of the digest in an encrypted one. It tells a repeated message from a different one
    -- with the same key. Payloads of different versions are not compared.
    payload_digest bytea       NOT NULL,
    owner          text COLLATE "C", -- The owner of the message, if the key is kept. erase needs it.
    CONSTRAINT dedupe_pkey PRIMARY KEY (topic, dedupe_key),
    CONSTRAINT dedupe_sound CHECK (dedupe_key <> '')
);
CREATE INDEX dedupe_owner ON pgoutbox.dedupe (owner) WHERE owner IS NOT NULL;
