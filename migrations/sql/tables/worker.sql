-- Workers write their row once a minute, so each update finds room on its page.
CREATE TABLE pgoutbox.worker (
    name       text COLLATE "C" NOT NULL,
    queues     text[]           NOT NULL,
    topics     text[]           NOT NULL,
    started_at timestamptz      NOT NULL DEFAULT now(),
    seen_at    timestamptz      NOT NULL DEFAULT now(),
    CONSTRAINT worker_pkey PRIMARY KEY (name)
) WITH (fillfactor = 50);

COMMENT ON TABLE pgoutbox.worker IS 'The workers that run, with their queues and topics. A worker deletes its row when it stops.';
COMMENT ON COLUMN pgoutbox.worker.name IS 'The name of the worker, as in `message.worker`.';
COMMENT ON COLUMN pgoutbox.worker.queues IS 'The queues that it serves.';
COMMENT ON COLUMN pgoutbox.worker.topics IS 'The topics that it has a handler for.';
COMMENT ON COLUMN pgoutbox.worker.started_at IS 'When it started.';
COMMENT ON COLUMN pgoutbox.worker.seen_at IS 'When it last reported, once a minute. Another worker deletes the row three minutes later.';
