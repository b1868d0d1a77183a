-- One row: an id up to which all ids were drawn. An enqueue refuses them.
--
-- Every enqueue compares its id with it, because no index has the ids of all messages that have ended. Only maintenance
-- writes the row.
CREATE TABLE pgoutbox.id_floor (
    newest_id bigint  NOT NULL DEFAULT 0, -- The last id that was drawn before the last turn of maintenance.
    is_single boolean PRIMARY KEY DEFAULT true, -- Always true: limits the table to one row.
    CONSTRAINT id_floor_single CHECK (is_single)
) WITH (fillfactor = 50);

INSERT INTO pgoutbox.id_floor DEFAULT VALUES;
