-- An entry of the history of a message, which is in its row: the history commits, moves and is deleted with it.
CREATE TYPE pgoutbox.attempt AS (
    attempt_count integer,
    times         integer,
    outcome       text,
    worker        text,
    started_at    timestamptz,
    ended_at      timestamptz,
    error         text,
    error_place   text,
    reason_code   text,
    breaker_key   text
);

COMMENT ON TYPE pgoutbox.attempt IS 'An attempt that did not end as sent, or several alike.';
COMMENT ON COLUMN pgoutbox.attempt.attempt_count IS 'Number of the attempt, or of the last of several.';
COMMENT ON COLUMN pgoutbox.attempt.times IS 'How many attempts in a row ended alike: 1 unless they were postponed.';
COMMENT ON COLUMN pgoutbox.attempt.outcome IS 'retry, failed, skipped, cancelled, snoozed, released or lost.';
COMMENT ON COLUMN pgoutbox.attempt.worker IS 'The worker that made the attempt, or the last one.';
COMMENT ON COLUMN pgoutbox.attempt.started_at IS 'Time of the claim, or of the first one.';
COMMENT ON COLUMN pgoutbox.attempt.ended_at IS 'When the outcome was written, or the last one.';
COMMENT ON COLUMN pgoutbox.attempt.error IS 'Error message, cut at 1000 characters.';
COMMENT ON COLUMN pgoutbox.attempt.error_place IS
    'The innermost frame of the application in the traceback of its handler: file:line function. Else null.';
COMMENT ON COLUMN pgoutbox.attempt.reason_code IS
    'Why pgoutbox postponed the message: circuit_open, stalled, unavailable, redirect or unreadable. Else null.';
COMMENT ON COLUMN pgoutbox.attempt.breaker_key IS
    'The circuit breaker that postponed it, for circuit_open and stalled.';
