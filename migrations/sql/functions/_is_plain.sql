-- The short check, for most messages. _argument_error checks all others.
-- PostgreSQL inlines the body only if the function has the volatility of pg_column_size: STABLE.
CREATE FUNCTION pgoutbox._is_plain(
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
RETURNS boolean
LANGUAGE sql
STABLE
PARALLEL SAFE
RETURN pg_catalog.num_nonnulls(
        destination, coalesce_key, dedupe_key, available_at, expires_at, headers, ordering_key, on_failed, max_delay,
        owner, on_duplicate
    ) OPERATOR(pg_catalog.=) 0
    AND topic OPERATOR(pg_catalog.~) '^[a-z][a-z0-9_.-]*$'
    AND queue OPERATOR(pg_catalog.~) '^[a-z][a-z0-9_.-]*$'
    AND pg_catalog.length(topic) OPERATOR(pg_catalog.<=) 63
    AND pg_catalog.length(queue) OPERATOR(pg_catalog.<=) 63
    AND pg_catalog.pg_column_size(payload) OPERATOR(pg_catalog.<=) 65536
    AND max_attempts OPERATOR(pg_catalog.>=) 1
    AND max_attempts OPERATOR(pg_catalog.<=) 10000;

COMMENT ON FUNCTION pgoutbox._is_plain IS
    'Whether no more than topic, payload, queue and max_attempts are given, and these are valid.';
