-- The workers that run, those that have stopped in the last two weeks, and the last runs of pgoutbox worker --once or
-- --drain.
--
-- Workers write their row once a minute, so each update finds room on its page. A host with only cron has no worker that
-- runs all the time. Its runs leave their rows, one for each line of the crontab. They tell which queues have a worker, and
-- the last one has the failures with which the next run continues.
CREATE TABLE pgoutbox.worker (
    name                 text COLLATE "C" PRIMARY KEY, -- The name of the worker, as in `message.worker`.
    queues               text[]           NOT NULL, -- The queues that it serves.
    topics               text[]           NOT NULL, -- The topics that it has a handler for.
    redirect_to          text, -- Its PGOUTBOX_REDIRECT_TO, which the database cannot know otherwise.
    version              text, -- Its version of pgoutbox.
    slots                integer, -- Its PGOUTBOX_CONCURRENCY: how many attempts it can have in flight.
    started_at           timestamptz      NOT NULL DEFAULT now(), -- When it started.
    -- When it last reported, once a minute. Another worker deletes the row two weeks later, or if it is not one of the
    -- newest 1000.
    seen_at              timestamptz      NOT NULL DEFAULT now(),
    stopped_at           timestamptz, -- When it stopped. Null if it runs, was killed, or is such a run.
    ended_at             timestamptz, -- When the run ended. Null while a worker runs.
    -- Time between the ends of the last two runs of these queues. Null after the first.
    run_interval_seconds double precision,
    -- Failures in a row of each transport, by circuit breaker, and digests of recipients with doubtful ones. The next
    -- run continues.
    failures             jsonb            NOT NULL DEFAULT '{}'
) WITH (fillfactor = 50);
