CREATE TABLE pgoutbox.upkeep (
    due_at    timestamptz NOT NULL,
    began_at  timestamptz NOT NULL,
    is_single boolean     NOT NULL DEFAULT true,
    worker    text        NOT NULL,
    CONSTRAINT upkeep_pkey PRIMARY KEY (is_single),
    CONSTRAINT upkeep_single CHECK (is_single)
) WITH (fillfactor = 50);

COMMENT ON TABLE pgoutbox.upkeep IS 'One row: the times of the last and the next turn of maintenance.';
COMMENT ON COLUMN pgoutbox.upkeep.due_at IS 'When the next turn may begin; the worker that changes it has the turn.';
COMMENT ON COLUMN pgoutbox.upkeep.began_at IS 'When the last turn began.';
COMMENT ON COLUMN pgoutbox.upkeep.is_single IS 'Always true: limits the table to one row.';
COMMENT ON COLUMN pgoutbox.upkeep.worker IS 'The worker that had the last turn.';
