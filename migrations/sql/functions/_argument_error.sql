-- One expression without a subselect, so that PostgreSQL inlines it: the single and the bulk path check by the same
-- rules at the cost of an IF. A bounded repetition in a regular expression costs ten times as much as an unbounded one.
-- Only large payloads are converted to text: that costs a tenth of an enqueue.
CREATE FUNCTION pgoutbox._argument_error(
    topic text,
    payload jsonb,
    queue text,
    destination text,
    coalesce_key text,
    dedupe_key text,
    available_at timestamptz,
    expires_at timestamptz,
    headers jsonb,
    max_attempts integer,
    ordering_key text,
    on_failed text,
    max_delay interval,
    owner text,
    on_duplicate text
)
RETURNS text
LANGUAGE sql
STABLE
PARALLEL SAFE
AS $function$
SELECT CASE
    WHEN topic IS NULL THEN 'topic: must not be null'
    WHEN length(topic) > 63 OR topic !~ '^[a-z][a-z0-9_.-]*$'
        THEN 'topic: must be 1 to 63 of a-z, 0-9, underscore, dot and hyphen, the first a letter'
    WHEN payload IS NULL THEN 'payload: must not be null (the JSON value null is accepted)'
    WHEN pg_column_size(payload) > 65536 AND octet_length(payload::text) > 16777216
        THEN 'payload: must not have more than 16777216 bytes'
    WHEN queue IS NULL THEN 'queue: must not be null'
    WHEN length(queue) > 63 OR queue !~ '^[a-z][a-z0-9_.-]*$'
        THEN 'queue: must be 1 to 63 of a-z, 0-9, underscore, dot and hyphen, the first a letter'
    WHEN max_attempts IS NULL THEN 'max_attempts: must not be null'
    WHEN max_attempts NOT BETWEEN 1 AND 10000 THEN 'max_attempts: must be from 1 to 10000'
    WHEN coalesce_key = '' THEN 'coalesce_key: must not be empty; pass NULL for no key'
    WHEN dedupe_key = '' THEN 'dedupe_key: must not be empty; pass NULL for no key'
    WHEN ordering_key = '' THEN 'ordering_key: must not be empty; pass NULL for no key'
    WHEN owner = '' THEN 'owner: must not be empty; pass NULL for no owner'
    WHEN octet_length(coalesce_key) > 512 THEN 'coalesce_key: must not be longer than 512 bytes'
    WHEN octet_length(dedupe_key) > 512 THEN 'dedupe_key: must not be longer than 512 bytes'
    WHEN octet_length(ordering_key) > 512 THEN 'ordering_key: must not be longer than 512 bytes'
    WHEN octet_length(owner) > 512 THEN 'owner: must not be longer than 512 bytes'
    WHEN ordering_key IS NOT NULL AND coalesce_key IS NOT NULL
        THEN 'ordering_key: must not be given together with coalesce_key'
    WHEN on_failed NOT IN ('continue', 'halt') THEN 'on_failed: must be continue or halt'
    WHEN on_failed IS NOT NULL AND ordering_key IS NULL THEN 'on_failed: must not be given without ordering_key'
    WHEN max_delay IS NOT NULL AND coalesce_key IS NULL THEN 'max_delay: must not be given without coalesce_key'
    WHEN max_delay NOT BETWEEN interval '0' AND interval '3650 days'
        THEN 'max_delay: must not be negative nor longer than 3650 days'
    WHEN on_duplicate NOT IN ('error', 'ignore') THEN 'on_duplicate: must be error or ignore'
    WHEN on_duplicate IS NOT NULL AND dedupe_key IS NULL THEN 'on_duplicate: must not be given without dedupe_key'
    WHEN octet_length(destination) > 2048 OR destination !~ '^[A-Za-z][A-Za-z0-9+.-]*:[^[:cntrl:]]+$'
        THEN 'destination: must be a URI such as mailto:a@example.org, without control characters, of at most 2048 '
            'bytes'
    WHEN strpos(destination, ',') > 0 AND lower(left(destination, 7)) = 'mailto:'
        THEN 'destination: must name one recipient, without a comma; enqueue one message for each'
    WHEN available_at IS NOT NULL AND NOT isfinite(available_at) THEN 'available_at: must be finite'
    WHEN available_at > now() + interval '10 years' THEN 'available_at: must not be more than 10 years ahead'
    WHEN expires_at IS NOT NULL AND (NOT isfinite(expires_at) OR expires_at > now() + interval '20 years')
        THEN 'expires_at: must be finite and not more than 20 years ahead'
    WHEN expires_at <= greatest(available_at, now()) THEN 'expires_at: must be later than now and than available_at'
    WHEN headers IS NOT NULL AND jsonb_typeof(headers) <> 'object' THEN 'headers: must be a JSON object of texts'
    WHEN headers IS NOT NULL AND jsonb_path_exists(headers, '$.* ? (@.type() != "string")')
        THEN 'headers: must be a JSON object of texts'
    WHEN headers IS NOT NULL AND jsonb_array_length(jsonb_path_query_array(headers, '$.keyvalue()')) > 64
        THEN 'headers: must not have more than 64 entries'
    WHEN headers IS NOT NULL AND (
        jsonb_path_exists(headers, '$.* ? (@ like_regex "[[:cntrl:]]")')
        OR jsonb_path_exists(headers, '$.keyvalue() ? (@.key like_regex "^$|[[:cntrl:]]")')
    ) THEN 'headers: must not have empty names, nor control characters in names or values'
    WHEN pg_column_size(headers) > 1024 AND octet_length(headers::text) > 65536
        THEN 'headers: must not have more than 65536 bytes'
END
$function$;

COMMENT ON FUNCTION pgoutbox._argument_error IS
    'The first invalid argument of enqueue, as name and reason; null if all are valid.';
