-- The parameters in the order of `ValidatedMessage`, then `notify`, as one row.
SELECT
    %s::pg_catalog.text AS topic,
    -- JSON is sent as text, because an asyncpg connection may have the application's own codec for jsonb.
    %s::pg_catalog.text::pg_catalog.jsonb AS payload,
    coalesce(%s::pg_catalog.text, 'default') AS queue,
    %s::pg_catalog.text AS destination,
    %s::pg_catalog.text AS coalesce_key,
    %s::pg_catalog.text AS dedupe_key,
    greatest(
        %s::pg_catalog.timestamptz,
        pg_catalog.now() OPERATOR(pg_catalog.+) pg_catalog.make_interval(secs => %s::pg_catalog.float8)
    ) AS available_at,
    %s::pg_catalog.timestamptz AS expires_at,
    pg_catalog.make_interval(secs => %s::pg_catalog.float8) AS expires_after,
    %s::pg_catalog.text::pg_catalog.jsonb AS headers,
    coalesce(%s::pg_catalog.int4, 11) AS max_attempts,
    %s::pg_catalog.text AS ordering_key,
    %s::pg_catalog.text AS on_failed,
    pg_catalog.make_interval(secs => %s::pg_catalog.float8) AS max_delay,
    %s::pg_catalog.text AS owner,
    %s::pg_catalog.text AS on_duplicate,
    %s::pg_catalog.bool AS notify
-- With OFFSET 0 every argument is computed once, before PostgreSQL inlines the function.
OFFSET 0
