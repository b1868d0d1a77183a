CREATE TABLE pgoutbox.attempt (
    message_id    bigint      NOT NULL,
    attempt_count integer     NOT NULL,
    outcome       text        NOT NULL,
    worker        text        NOT NULL,
    started_at    timestamptz NOT NULL,
    ended_at      timestamptz NOT NULL,
    error         text,
    error_place   text,
    reason_code   text,
    breaker_key   text,
    CONSTRAINT attempt_pkey PRIMARY KEY (message_id, attempt_count),
    CONSTRAINT attempt_reason_code_known CHECK (
        reason_code IN ('circuit_open', 'stalled', 'unavailable', 'redirect')
    ),
    CONSTRAINT attempt_breaker_key_sound CHECK (
        (breaker_key IS NOT NULL) = (reason_code IS NOT NULL AND reason_code IN ('circuit_open', 'stalled'))
    ),
    CONSTRAINT attempt_outcome_known CHECK (
        outcome IN ('retry', 'failed', 'skipped', 'cancelled', 'snoozed', 'released', 'lost')
    )
);

COMMENT ON TABLE pgoutbox.attempt IS
    'Attempts that did not end as sent, with their errors. A sent message stores its last attempt itself.';
COMMENT ON COLUMN pgoutbox.attempt.message_id IS 'The message.';
COMMENT ON COLUMN pgoutbox.attempt.attempt_count IS 'Number of the attempt: its fencing token.';
COMMENT ON COLUMN pgoutbox.attempt.outcome IS 'retry, failed, skipped, cancelled, snoozed, released or lost.';
COMMENT ON COLUMN pgoutbox.attempt.worker IS 'The worker that made the attempt.';
COMMENT ON COLUMN pgoutbox.attempt.started_at IS 'Time of the claim.';
COMMENT ON COLUMN pgoutbox.attempt.ended_at IS 'When the outcome was written.';
COMMENT ON COLUMN pgoutbox.attempt.error IS 'Error message, cut at 4000 characters.';
COMMENT ON COLUMN pgoutbox.attempt.error_place IS
    'The innermost frame of the application in the traceback of its handler: file:line function. Else null.';
COMMENT ON COLUMN pgoutbox.attempt.reason_code IS
    'Why pgoutbox postponed the message: circuit_open, stalled, unavailable or redirect. Else null.';
COMMENT ON COLUMN pgoutbox.attempt.breaker_key IS
    'The circuit breaker that postponed it, for circuit_open and stalled.';
