-- What another queue did for a message before its import.
--
-- The further fields of a message that is imported, beside those of a draft.
CREATE TYPE pgoutbox.progress AS (
    attempt_count integer, -- Number of attempts that it made.
    last_error    text, -- Error of the last of them, cut at 4000 characters.
    failed_at     timestamptz -- When it gave up. Null for a message that is still to be delivered.
);
