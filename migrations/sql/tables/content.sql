-- Shared contents of fan-outs; deleted with their last message.
CREATE TABLE pgoutbox.content (
    id         bigint      PRIMARY KEY GENERATED ALWAYS AS IDENTITY, -- The id in the column content_id of messages.
    created_at timestamptz NOT NULL DEFAULT now(), -- Start of the transaction that enqueued the fan-out.
    body       jsonb       NOT NULL -- The content, read by the handlers of its messages.
);
