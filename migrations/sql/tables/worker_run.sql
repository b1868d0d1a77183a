-- A host with only cron has no worker that is connected all the time. This row tells the doctor that runs take place, and
-- a run that a server is down: a process of its own would begin to count its failures at zero.
CREATE TABLE pgoutbox.worker_run (
    ended_at         timestamptz NOT NULL DEFAULT now(),
    interval_seconds double precision,
    is_single        boolean     NOT NULL DEFAULT true,
    worker           text        NOT NULL,
    failures         jsonb       NOT NULL DEFAULT '{}',
    CONSTRAINT worker_run_pkey PRIMARY KEY (is_single),
    CONSTRAINT worker_run_single CHECK (is_single)
) WITH (fillfactor = 50);

COMMENT ON TABLE pgoutbox.worker_run IS 'One row: the last run of pgoutbox worker --once or --drain.';
COMMENT ON COLUMN pgoutbox.worker_run.ended_at IS 'When the last run ended.';
COMMENT ON COLUMN pgoutbox.worker_run.interval_seconds IS 'Time between the ends of the last two runs. Null after the first.';
COMMENT ON COLUMN pgoutbox.worker_run.is_single IS 'Always true: limits the table to one row.';
COMMENT ON COLUMN pgoutbox.worker_run.worker IS 'The worker of the last run.';
COMMENT ON COLUMN pgoutbox.worker_run.failures IS
    'Failures in a row of each transport, by circuit breaker, and digests of recipients with doubtful ones. The next run continues.';
