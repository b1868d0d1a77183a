-- Every way to enqueue builds drafts, and _enqueue alone writes them. Null means the default. These names are the options
-- of `enqueue_many`: an option that is added here is an option there.
CREATE TYPE pgoutbox.draft AS (
    topic         text,
    payload       jsonb,
    queue         text,
    destination   text,
    owner         text,
    coalesce_key  text,
    ordering_key  text,
    dedupe_key    text,
    on_duplicate  text,
    halts_key     boolean,
    available_at  timestamptz,
    delay         interval,
    max_delay     interval,
    expires_at    timestamptz,
    expires_after interval,
    max_attempts  integer,
    headers       jsonb
);

COMMENT ON TYPE pgoutbox.draft IS
    'A message that is to be enqueued: the columns of message of the same names, and the options that compute them.';
