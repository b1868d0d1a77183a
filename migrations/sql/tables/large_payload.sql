-- A message moves from partition to partition, and its row is written again each time. A large payload does not move
-- with it: it is written once, here, and deleted with the message (docs/decisions/0024). MAIN keeps it on the page of
-- its row, where TOAST would cut it into pieces of 2 kB with an index entry each.
CREATE TABLE pgoutbox.large_payload (
    message_id bigint NOT NULL,
    body       jsonb  NOT NULL,
    CONSTRAINT large_payload_pkey PRIMARY KEY (message_id)
);

ALTER TABLE pgoutbox.large_payload ALTER COLUMN body SET STORAGE MAIN;

COMMENT ON TABLE pgoutbox.large_payload IS
    'The payloads of messages whose column payload is null; each is deleted with its message.';
COMMENT ON COLUMN pgoutbox.large_payload.message_id IS 'The message.';
COMMENT ON COLUMN pgoutbox.large_payload.body IS 'Its payload.';
