-- Enqueue one message in the caller's transaction. The parameters are positional because drivers of several kinds run
-- this statement; their order is that of `ValidatedMessage`, then `notify`.
-- Statements on the caller's connection do not trust its search_path: types and operators are qualified too.
SELECT
    pg_catalog.abs(r.receipt) AS id,
    r.receipt OPERATOR(pg_catalog.<) 0 AS duplicate,
    CASE WHEN r.receipt OPERATOR(pg_catalog.<) 0 THEN pgoutbox._state_of(pg_catalog.abs(r.receipt)) END AS state
FROM (
    SELECT pgoutbox._enqueue_receipt(
        topic => draft.topic,
        payload => draft.payload,
        queue => draft.queue,
        destination => draft.destination,
        coalesce_key => draft.coalesce_key,
        dedupe_key => draft.dedupe_key,
        available_at => draft.available_at,
        expires_at => coalesce(
            draft.expires_at,
            greatest(draft.available_at, pg_catalog.now()) OPERATOR(pg_catalog.+) draft.expires_after
        ),
        headers => draft.headers,
        max_attempts => draft.max_attempts,
        ordering_key => draft.ordering_key,
        on_failed => draft.on_failed,
        max_delay => draft.max_delay,
        coalesce_rule => draft.coalesce_rule,
        owner => draft.owner,
        on_duplicate => draft.on_duplicate,
        notify => draft.notify
    ) AS receipt
    FROM (
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
            %s::pg_catalog.text AS coalesce_rule,
            %s::pg_catalog.text AS owner,
            %s::pg_catalog.text AS on_duplicate,
            %s::pg_catalog.bool AS notify
        -- With OFFSET 0 every argument is computed once, before PostgreSQL inlines the function.
        OFFSET 0
    ) AS draft
) AS r
