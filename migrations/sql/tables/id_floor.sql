-- One row. Every enqueue compares its id with it, because no index has the ids of all messages that have ended. Only
-- maintenance writes the row.
CREATE TABLE pgoutbox.id_floor (
    newest_id bigint  NOT NULL DEFAULT 0,
    is_single boolean NOT NULL DEFAULT true,
    CONSTRAINT id_floor_pkey PRIMARY KEY (is_single),
    CONSTRAINT id_floor_single CHECK (is_single)
) WITH (fillfactor = 50);

COMMENT ON TABLE pgoutbox.id_floor IS 'One row: an id up to which all ids were drawn. An enqueue refuses them.';
COMMENT ON COLUMN pgoutbox.id_floor.newest_id IS 'The last id that was drawn before the last turn of maintenance.';
COMMENT ON COLUMN pgoutbox.id_floor.is_single IS 'Always true: limits the table to one row.';

INSERT INTO pgoutbox.id_floor DEFAULT VALUES;
