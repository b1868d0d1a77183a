-- Write one message in this transaction and wake a sleeping worker when it commits. Returns the id; if another message
-- has the dedupe key, the id of that message.
--
-- After the first release an option is added to enqueue_many alone, so that this signature stays. PostgreSQL inlines the
-- body, which costs nothing without options. An interval is a number of seconds: the length of a day or a month would
-- depend on the session's time zone.
CREATE FUNCTION pgoutbox.enqueue(
    topic text,
    payload jsonb,
    queue text DEFAULT NULL,
    destination text DEFAULT NULL,
    owner text DEFAULT NULL,
    coalesce_key text DEFAULT NULL,
    ordering_key text DEFAULT NULL,
    fair_key text DEFAULT NULL,
    dedupe_key text DEFAULT NULL,
    on_duplicate text DEFAULT NULL,
    halts_key boolean DEFAULT NULL,
    available_at timestamptz DEFAULT NULL,
    delay interval DEFAULT NULL,
    max_delay interval DEFAULT NULL,
    expires_at timestamptz DEFAULT NULL,
    expires_after interval DEFAULT NULL,
    max_attempts integer DEFAULT NULL,
    headers jsonb DEFAULT NULL,
    payload_version integer DEFAULT NULL,
    notify boolean DEFAULT true
)
RETURNS bigint
LANGUAGE sql
RETURN abs(pgoutbox._enqueue_receipt(
    topic,
    payload,
    CASE WHEN num_nonnulls(
        queue, destination, owner, coalesce_key, ordering_key, fair_key, dedupe_key, on_duplicate, halts_key,
        available_at, delay, max_delay, expires_at, expires_after, max_attempts, headers, payload_version
    ) > 0 THEN ROW(
        NULL, NULL, queue, destination, owner, coalesce_key, ordering_key, fair_key, dedupe_key, on_duplicate,
        halts_key, available_at, make_interval(secs => extract(epoch FROM delay)::float8),
        make_interval(secs => extract(epoch FROM max_delay)::float8), expires_at,
        make_interval(secs => extract(epoch FROM expires_after)::float8), max_attempts, nullif(headers, 'null'), payload_version
    )::pgoutbox.draft END,
    notify
));
