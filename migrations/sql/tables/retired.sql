-- Each function that changes partitions locks this table first. Only its owner may lock it, but every login could take
-- an advisory lock. These functions run with the owner's privileges, so that a worker needs none. They generate the
-- names in their dynamic SQL, or read them from the catalog.
CREATE TABLE pgoutbox.retired (
    retired_at timestamptz NOT NULL DEFAULT now(),
    cleared_id bigint      NOT NULL DEFAULT 0,
    name       text COLLATE "C" NOT NULL,
    CONSTRAINT retired_pkey PRIMARY KEY (name),
    CONSTRAINT retired_name_sound CHECK (name ~ '^message_done_[0-9]{8}$')
);

COMMENT ON TABLE pgoutbox.retired IS
    'Partitions that retention has detached from message_done; dropped when attempts, large payloads and keys of their'
    ' messages are deleted.';
COMMENT ON COLUMN pgoutbox.retired.retired_at IS 'When it was detached.';
COMMENT ON COLUMN pgoutbox.retired.cleared_id IS
    'Attempts, large payloads and keys of messages up to this id are deleted.';
COMMENT ON COLUMN pgoutbox.retired.name IS 'Name of the table.';
