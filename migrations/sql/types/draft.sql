-- A message that is to be enqueued: the columns of message of the same names, and the options that compute them.
--
-- Every way to enqueue builds drafts, and _enqueue and _enqueue_receipt write them. Null means the default. These names are
-- the options of `enqueue_many`: an option that is added here is an option there.
CREATE TYPE pgoutbox.draft AS (
    topic           text,
    payload         jsonb,
    queue           text,
    destination     text,
    owner           text,
    coalesce_key    text,
    ordering_key    text,
    fair_key        text,
    dedupe_key      text,
    on_duplicate    text,
    halts_key       boolean,
    available_at    timestamptz,
    delay           interval,
    max_delay       interval,
    expires_at      timestamptz,
    expires_after   interval,
    max_attempts    integer,
    headers         jsonb,
    payload_version integer
);

-- The first invalid field of a draft, as name and reason; null if all are valid. One expression without a subselect, so
-- that PostgreSQL inlines it. A bounded repetition in a regular expression costs ten times as much as an unbounded one.
-- Only large payloads are converted to text: that costs a tenth of an enqueue.
CREATE FUNCTION pgoutbox._draft_error(draft pgoutbox.draft)
RETURNS text
LANGUAGE sql
STABLE
PARALLEL SAFE
AS $function$
SELECT CASE
    WHEN draft.topic IS NULL THEN 'topic: must not be null'
    WHEN length(draft.topic) > 63 OR draft.topic !~ '^[a-z][a-z0-9_.-]*$'
        THEN 'topic: must be 1 to 63 of a-z, 0-9, underscore, dot and hyphen, the first a letter'
    WHEN draft.payload IS NULL THEN 'payload: must not be null (the JSON value null is accepted)'
    WHEN pg_column_size(draft.payload) > 65536 AND octet_length(draft.payload::text) > 16777216
        THEN 'payload: must not have more than 16777216 bytes'
    WHEN length(draft.queue) > 63 OR draft.queue !~ '^[a-z][a-z0-9_.-]*$'
        THEN 'queue: must be 1 to 63 of a-z, 0-9, underscore, dot and hyphen, the first a letter'
    WHEN draft.payload_version NOT BETWEEN 1 AND 100 THEN 'payload_version: must be from 1 to 100'
    WHEN draft.max_attempts NOT BETWEEN 1 AND 10000 THEN 'max_attempts: must be from 1 to 10000'
    WHEN draft.coalesce_key = '' THEN 'coalesce_key: must not be empty; pass NULL for no key'
    WHEN draft.dedupe_key = '' THEN 'dedupe_key: must not be empty; pass NULL for no key'
    WHEN draft.ordering_key = '' THEN 'ordering_key: must not be empty; pass NULL for no key'
    WHEN draft.fair_key = '' THEN 'fair_key: must not be empty; pass NULL for no key'
    WHEN draft.owner = '' THEN 'owner: must not be empty; pass NULL for no owner'
    WHEN octet_length(draft.coalesce_key) > 512 THEN 'coalesce_key: must not be longer than 512 bytes'
    WHEN octet_length(draft.dedupe_key) > 512 THEN 'dedupe_key: must not be longer than 512 bytes'
    WHEN octet_length(draft.ordering_key) > 512 THEN 'ordering_key: must not be longer than 512 bytes'
    WHEN octet_length(draft.fair_key) > 512 THEN 'fair_key: must not be longer than 512 bytes'
    WHEN octet_length(draft.owner) > 512 THEN 'owner: must not be longer than 512 bytes'
    WHEN draft.ordering_key IS NOT NULL AND draft.coalesce_key IS NOT NULL
        THEN 'ordering_key: must not be given together with coalesce_key'
    WHEN draft.ordering_key IS NOT NULL AND draft.fair_key IS NOT NULL
        THEN 'fair_key: must not be given together with ordering_key'
    WHEN draft.halts_key AND draft.ordering_key IS NULL
        THEN 'halts_key: must not be given without ordering_key'
    WHEN draft.max_delay IS NOT NULL AND draft.coalesce_key IS NULL
        THEN 'max_delay: must not be given without coalesce_key'
    WHEN draft.max_delay NOT BETWEEN interval '0' AND interval '3650 days'
        THEN 'max_delay: must not be negative nor longer than 3650 days'
    WHEN draft.on_duplicate NOT IN ('error', 'ignore') THEN 'on_duplicate: must be error or ignore'
    WHEN draft.on_duplicate IS NOT NULL AND draft.dedupe_key IS NULL
        THEN 'on_duplicate: must not be given without dedupe_key'
    WHEN octet_length(draft.destination) > 2048 OR draft.destination !~ '^[A-Za-z][A-Za-z0-9+.-]*:[^[:cntrl:]]+$'
        THEN 'destination: must be a URI such as mailto:a@example.org, without control characters, of at most 2048 '
            'bytes'
    WHEN strpos(draft.destination, ',') > 0 AND lower(left(draft.destination, 7)) = 'mailto:'
        THEN 'destination: must name one recipient, without a comma; enqueue one message for each'
    WHEN draft.delay IS NOT NULL AND draft.available_at IS NOT NULL
        THEN 'delay: must not be given together with available_at'
    WHEN draft.delay NOT BETWEEN interval '0' AND interval '3650 days'
        THEN 'delay: must not be negative nor longer than 3650 days'
    WHEN draft.available_at IS NOT NULL AND NOT isfinite(draft.available_at) THEN 'available_at: must be finite'
    WHEN draft.available_at > now() + interval '10 years' THEN 'available_at: must not be more than 10 years ahead'
    WHEN draft.expires_after IS NOT NULL AND draft.expires_at IS NOT NULL
        THEN 'expires_after: must not be given together with expires_at'
    WHEN draft.expires_after NOT BETWEEN interval '1 microsecond' AND interval '3650 days'
        THEN 'expires_after: must be more than zero and not longer than 3650 days'
    WHEN draft.expires_at IS NOT NULL
        AND (NOT isfinite(draft.expires_at) OR draft.expires_at > now() + interval '20 years')
        THEN 'expires_at: must be finite and not more than 20 years ahead'
    WHEN draft.expires_at <= greatest(draft.available_at, now() + draft.delay, now())
        THEN 'expires_at: must be later than now and than the due time'
    WHEN draft.headers IS NOT NULL AND jsonb_typeof(draft.headers) <> 'object'
        THEN 'headers: must be a JSON object of texts'
    WHEN draft.headers IS NOT NULL AND jsonb_path_exists(draft.headers, 'strict $.* ? (@.type() != "string")')
        THEN 'headers: must be a JSON object of texts'
    WHEN draft.headers IS NOT NULL
        AND jsonb_array_length(jsonb_path_query_array(draft.headers, '$.keyvalue()')) > 64
        THEN 'headers: must not have more than 64 entries'
    WHEN draft.headers IS NOT NULL AND (
        jsonb_path_exists(draft.headers, '$.* ? (@ like_regex "[[:cntrl:]]")')
        OR jsonb_path_exists(draft.headers, '$.keyvalue() ? (@.key like_regex "^$|[[:cntrl:]]")')
    ) THEN 'headers: must not have empty names, nor control characters in names or values'
    WHEN pg_column_size(draft.headers) > 1024 AND octet_length(draft.headers::text) > 65536
        THEN 'headers: must not have more than 65536 bytes'
END
$function$;
