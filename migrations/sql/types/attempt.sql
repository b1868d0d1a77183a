-- An attempt that did not end as sent, or several alike.
--
-- An entry of the history of a message, which is in its row: the history commits, moves and is deleted with it. Workers build
-- it field by field, so no later revision adds a field.
CREATE TYPE pgoutbox.attempt AS (
    attempt_count integer, -- Number of the attempt, or of the last of several.
    times         integer, -- How many attempts in a row ended alike: 1 unless they were postponed.
    outcome       text, -- retry, failed, skipped, cancelled, snoozed, released or lost.
    worker        text, -- The worker that made the attempt, or the last one.
    started_at    timestamptz, -- Time of the claim, or of the first one.
    ended_at      timestamptz, -- When the outcome was written, or the last one.
    error         text, -- Error message, cut at 1000 characters.
    -- The innermost frame of the application in the traceback of its handler: file:line function. Else null.
    error_place   text,
    -- Why pgoutbox postponed the message: circuit_open, stalled, unavailable, redirect or unreadable. Or why it skipped the
    -- message: suppressed. Else null.
    reason_code   text,
    breaker_key   text -- The circuit breaker that postponed it, for circuit_open and stalled.
);
