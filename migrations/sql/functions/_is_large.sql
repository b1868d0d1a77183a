-- The stored size in bytes. Below this limit, a second row costs an enqueue more than the copies cost a finish.
CREATE FUNCTION pgoutbox._is_large(payload jsonb)
RETURNS boolean
LANGUAGE sql
STABLE
PARALLEL SAFE
RETURN pg_catalog.pg_column_size(payload) OPERATOR(pg_catalog.>) 1000;

COMMENT ON FUNCTION pgoutbox._is_large IS
    'Whether a payload is too large for the row of its message, and is stored in large_payload.';
