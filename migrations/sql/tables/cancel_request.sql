-- Messages in flight that shall be cancelled: their handler is told, and no other attempt begins.
--
-- A transaction that cancels a message in flight writes a row here instead of locking the message, which its worker
-- needs. Two transactions may ask for the same message without waiting for each other, so there is no primary key. An id
-- may come again, for example if the sequence was not restored with the data. The creation of the message does not.
CREATE TABLE pgoutbox.cancel_request (
    message_id         bigint      NOT NULL, -- The message.
    message_created_at timestamptz NOT NULL, -- Its created_at: another message with this id is not meant.
    requested_at       timestamptz NOT NULL DEFAULT now() -- Start of the transaction that asked for it.
);

CREATE INDEX cancel_request_message ON pgoutbox.cancel_request (message_id, message_created_at);
