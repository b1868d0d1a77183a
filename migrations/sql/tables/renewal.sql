-- A transaction that cancels an attempt in flight keeps its row locked until it ends, perhaps for longer than the
-- lease. Its worker then renews the lease here, and the claim of lapsed attempts reads this table.
CREATE TABLE pgoutbox.renewal (
    message_id       bigint      NOT NULL,
    lease_expires_at timestamptz NOT NULL,
    attempt_count    integer     NOT NULL,
    worker           text        NOT NULL,
    CONSTRAINT renewal_pkey PRIMARY KEY (message_id)
);

COMMENT ON TABLE pgoutbox.renewal IS
    'Leases that were renewed while a transaction that cancels the message had its row locked.';
COMMENT ON COLUMN pgoutbox.renewal.message_id IS 'The message.';
COMMENT ON COLUMN pgoutbox.renewal.lease_expires_at IS
    'When the attempt counts as lost; the lease in the message ends earlier.';
COMMENT ON COLUMN pgoutbox.renewal.attempt_count IS 'The attempt in flight.';
COMMENT ON COLUMN pgoutbox.renewal.worker IS 'The worker of the attempt.';
