-- The items of a bulk as rows, with defaults. PostgreSQL inlines the query.
CREATE FUNCTION pgoutbox._bulk_items(
    topics text[],
    payloads jsonb[],
    queues text[],
    destinations text[],
    coalesce_keys text[],
    dedupe_keys text[],
    available_ats timestamptz[],
    delays double precision[],
    expires_ats timestamptz[],
    headers jsonb[],
    max_attempts integer[],
    ordering_keys text[],
    on_failed text[],
    max_delays double precision[],
    owners text[],
    on_duplicates text[]
)
RETURNS TABLE (
    item_index integer, topic text, payload jsonb, queue text, destination text, coalesce_key text, dedupe_key text,
    available_at timestamptz, expires_at timestamptz, headers jsonb, max_attempts integer, ordering_key text,
    on_failed text, max_delay interval, owner text, on_duplicate text
)
LANGUAGE sql
STABLE
BEGIN ATOMIC
    SELECT
        a.ordinality::integer OPERATOR(pg_catalog.-) 1, a.topic, a.payload, coalesce(a.queue, 'default'),
        a.destination, a.coalesce_key, a.dedupe_key,
        greatest(
            a.available_at, pg_catalog.now() OPERATOR(pg_catalog.+) pg_catalog.make_interval(secs => a.delay)
        ),
        a.expires_at, a.headers, coalesce(a.max_attempts, 11), a.ordering_key, a.on_failed,
        pg_catalog.make_interval(secs => a.max_delay), a.owner, a.on_duplicate
    FROM unnest(
        topics, payloads, queues, destinations, coalesce_keys, dedupe_keys, available_ats, delays, expires_ats,
        headers, max_attempts, ordering_keys, on_failed, max_delays, owners, on_duplicates
    ) WITH ORDINALITY AS a(
        topic, payload, queue, destination, coalesce_key, dedupe_key, available_at, delay, expires_at,
        headers, max_attempts, ordering_key, on_failed, max_delay, owner, on_duplicate, ordinality
    );
END;

COMMENT ON FUNCTION pgoutbox._bulk_items IS 'The items of enqueue_many as rows, with their defaults.';
