-- The shared content of a fan-out is stored once, and deleted with its last message.
CREATE TABLE pgoutbox.content (
    id         bigint      GENERATED ALWAYS AS IDENTITY,
    created_at timestamptz NOT NULL DEFAULT now(),
    body       jsonb       NOT NULL,
    CONSTRAINT content_pkey PRIMARY KEY (id)
);

COMMENT ON TABLE pgoutbox.content IS 'Shared contents of fan-outs; deleted with their last message.';
COMMENT ON COLUMN pgoutbox.content.id IS 'The id in the column content_id of messages.';
COMMENT ON COLUMN pgoutbox.content.created_at IS 'Start of the transaction that enqueued the fan-out.';
COMMENT ON COLUMN pgoutbox.content.body IS 'The content, read by the handlers of its messages.';
