-- Settings of a worker's environment are unknown to the database. So each worker with a redirect reports it.
CREATE TABLE pgoutbox.redirect_report (
    worker      text COLLATE "C" NOT NULL,
    reported_at timestamptz      NOT NULL,
    target      text             NOT NULL,
    CONSTRAINT redirect_report_pkey PRIMARY KEY (worker)
);

COMMENT ON TABLE pgoutbox.redirect_report IS 'Workers that redirect e-mail by their environment.';
COMMENT ON COLUMN pgoutbox.redirect_report.worker IS 'The worker.';
COMMENT ON COLUMN pgoutbox.redirect_report.reported_at IS 'A report older than 90 seconds no longer counts.';
COMMENT ON COLUMN pgoutbox.redirect_report.target IS 'The worker''s PGOUTBOX_REDIRECT_TO.';
