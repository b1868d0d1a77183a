CREATE TABLE pgoutbox.maintenance_run (
    due_at       timestamptz NOT NULL,
    began_at     timestamptz NOT NULL,
    succeeded_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    is_single    boolean     NOT NULL DEFAULT true,
    worker       text        NOT NULL,
    CONSTRAINT maintenance_run_pkey PRIMARY KEY (is_single),
    CONSTRAINT maintenance_run_single CHECK (is_single)
) WITH (fillfactor = 50);

COMMENT ON TABLE pgoutbox.maintenance_run IS 'One row: the times of the last and the next turn of maintenance.';
COMMENT ON COLUMN pgoutbox.maintenance_run.due_at IS 'When the next turn may begin; the worker that changes it has the turn.';
COMMENT ON COLUMN pgoutbox.maintenance_run.began_at IS 'When the last turn began.';
COMMENT ON COLUMN pgoutbox.maintenance_run.succeeded_at IS
    'When a turn last ended without an error. Before that, when the first turn began.';
COMMENT ON COLUMN pgoutbox.maintenance_run.is_single IS 'Always true: limits the table to one row.';
COMMENT ON COLUMN pgoutbox.maintenance_run.worker IS 'The worker that had the last turn.';
