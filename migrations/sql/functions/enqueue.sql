-- PostgreSQL inlines the body, so the function costs nothing.
CREATE FUNCTION pgoutbox.enqueue(
    topic text,
    payload jsonb,
    queue text DEFAULT 'default',
    destination text DEFAULT NULL,
    coalesce_key text DEFAULT NULL,
    dedupe_key text DEFAULT NULL,
    available_at timestamptz DEFAULT NULL,
    expires_at timestamptz DEFAULT NULL,
    headers jsonb DEFAULT NULL,
    max_attempts integer DEFAULT 11,
    notify boolean DEFAULT true,
    ordering_key text DEFAULT NULL,
    on_failed text DEFAULT NULL,
    max_delay interval DEFAULT NULL,
    owner text DEFAULT NULL,
    on_duplicate text DEFAULT NULL
)
RETURNS bigint
LANGUAGE sql
RETURN pg_catalog.abs(pgoutbox._enqueue_receipt(
    topic, payload, queue, destination, coalesce_key, dedupe_key,
    available_at, expires_at, headers, max_attempts, ordering_key, on_failed, max_delay, owner,
    on_duplicate, notify
));

COMMENT ON FUNCTION pgoutbox.enqueue IS
    'Write one message in this transaction and wake a sleeping worker when it commits. Returns the id; if another '
    'message has the dedupe key, the id of that message.';
