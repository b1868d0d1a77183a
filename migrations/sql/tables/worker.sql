-- Workers write their row once a minute, so each update finds room on its page. A host with only cron has no worker that
-- runs all the time. Its runs leave their rows, one for each line of the crontab. They tell which queues have a worker, and
-- the last one has the failures with which the next run continues.
CREATE TABLE pgoutbox.worker (
    name                 text COLLATE "C" NOT NULL,
    queues               text[]           NOT NULL,
    topics               text[]           NOT NULL,
    redirect_to          text,
    version              text,
    slots                integer,
    started_at           timestamptz      NOT NULL DEFAULT now(),
    seen_at              timestamptz      NOT NULL DEFAULT now(),
    ended_at             timestamptz,
    run_interval_seconds double precision,
    failures             jsonb            NOT NULL DEFAULT '{}',
    CONSTRAINT worker_pkey PRIMARY KEY (name)
) WITH (fillfactor = 50);

COMMENT ON TABLE pgoutbox.worker IS
    'The workers that run, and the last runs of pgoutbox worker --once or --drain. Other workers delete their row when they stop.';
COMMENT ON COLUMN pgoutbox.worker.name IS 'The name of the worker, as in `message.worker`.';
COMMENT ON COLUMN pgoutbox.worker.queues IS 'The queues that it serves.';
COMMENT ON COLUMN pgoutbox.worker.topics IS 'The topics that it has a handler for.';
COMMENT ON COLUMN pgoutbox.worker.redirect_to IS 'Its PGOUTBOX_REDIRECT_TO, which the database cannot know otherwise.';
COMMENT ON COLUMN pgoutbox.worker.version IS 'Its version of pgoutbox.';
COMMENT ON COLUMN pgoutbox.worker.slots IS 'Its PGOUTBOX_CONCURRENCY: how many attempts it can have in flight.';
COMMENT ON COLUMN pgoutbox.worker.started_at IS 'When it started.';
COMMENT ON COLUMN pgoutbox.worker.seen_at IS 'When it last reported, once a minute. Another worker deletes the row three minutes later.';
COMMENT ON COLUMN pgoutbox.worker.ended_at IS 'When the run ended. Null while a worker runs.';
COMMENT ON COLUMN pgoutbox.worker.run_interval_seconds IS 'Time between the ends of the last two runs of these queues. Null after the first.';
COMMENT ON COLUMN pgoutbox.worker.failures IS
    'Failures in a row of each transport, by circuit breaker, and digests of recipients with doubtful ones. The next run continues.';
