-- The further fields of a message that is imported, beside those of a draft.
CREATE TYPE pgoutbox.progress AS (
    attempt_count integer,
    last_error    text,
    failed_at     timestamptz
);

COMMENT ON TYPE pgoutbox.progress IS 'What another queue did for a message before its import.';
COMMENT ON COLUMN pgoutbox.progress.attempt_count IS 'Number of attempts that it made.';
COMMENT ON COLUMN pgoutbox.progress.last_error IS 'Error of the last of them, cut at 4000 characters.';
COMMENT ON COLUMN pgoutbox.progress.failed_at IS 'When it gave up. Null for a message that is still to be delivered.';
