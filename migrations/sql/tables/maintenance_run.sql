-- One row: the times of the last and the next turn of maintenance.
CREATE TABLE pgoutbox.maintenance_run (
    due_at       timestamptz NOT NULL, -- When the next turn may begin; the worker that changes it has the turn.
    began_at     timestamptz NOT NULL, -- When the last turn began.
    -- When a turn last ended without an error. Before that, when the first turn began.
    succeeded_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    is_single    boolean     PRIMARY KEY DEFAULT true, -- Always true: limits the table to one row.
    worker       text        NOT NULL, -- The worker that had the last turn.
    CONSTRAINT maintenance_run_single CHECK (is_single)
) WITH (fillfactor = 50);
