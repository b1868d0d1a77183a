-- Settings of a worker's environment are unknown to the database. So each worker with a redirect or a blackout reports.
CREATE TABLE pgoutbox.redirect_report (
    worker         text COLLATE "C" NOT NULL,
    reported_at    timestamptz      NOT NULL,
    target         text,
    refused_within text,
    CONSTRAINT redirect_report_pkey PRIMARY KEY (worker),
    CONSTRAINT redirect_report_sound CHECK (num_nonnulls(target, refused_within) > 0)
);

COMMENT ON TABLE pgoutbox.redirect_report IS
    'Workers that redirect e-mail by their environment, or hold it back because of a blackout.';
COMMENT ON COLUMN pgoutbox.redirect_report.worker IS 'The worker.';
COMMENT ON COLUMN pgoutbox.redirect_report.reported_at IS 'A report older than 90 seconds no longer counts.';
COMMENT ON COLUMN pgoutbox.redirect_report.target IS 'The worker''s PGOUTBOX_REDIRECT_TO; null without one.';
COMMENT ON COLUMN pgoutbox.redirect_report.refused_within IS
    'The blackout that forbids to redirect, so that e-mail waits; null: none.';
