-- Enqueue one message for each destination in the caller's transaction, with one shared content. The order of the
-- parameters is that of `Fanout`, then `notify`. All names are qualified, see enqueue.sql.
SELECT r.item_index, r.id
FROM (
    SELECT
        %s::pg_catalog.text AS topic,
        %s::pg_catalog.text::pg_catalog.jsonb AS payload,
        %s::pg_catalog.text[] AS destinations,
        %s::pg_catalog.text::pg_catalog.jsonb AS content,
        coalesce(%s::pg_catalog.text, 'default') AS queue,
        greatest(
            %s::pg_catalog.timestamptz,
            pg_catalog.now() OPERATOR(pg_catalog.+) pg_catalog.make_interval(secs => %s::pg_catalog.float8)
        ) AS available_at,
        %s::pg_catalog.timestamptz AS expires_at,
        pg_catalog.make_interval(secs => %s::pg_catalog.float8) AS expires_after,
        %s::pg_catalog.text::pg_catalog.jsonb AS headers,
        coalesce(%s::pg_catalog.int4, 11) AS max_attempts,
        %s::pg_catalog.text AS owner,
        %s::pg_catalog.text[]::pg_catalog.jsonb[] AS payloads,
        %s::pg_catalog.text[]::pg_catalog.jsonb[] AS headers_each,
        %s::pg_catalog.timestamptz[] AS available_ats,
        %s::pg_catalog.float8[] AS delays,
        %s::pg_catalog.text[] AS owners,
        %s::pg_catalog.bool AS notify
    -- With OFFSET 0 every argument is computed once, before PostgreSQL inlines the function.
    OFFSET 0
) AS draft
CROSS JOIN LATERAL pgoutbox.enqueue_fanout(
    topic => draft.topic,
    payload => draft.payload,
    destinations => draft.destinations,
    content => draft.content,
    queue => draft.queue,
    available_at => draft.available_at,
    expires_at => coalesce(
        draft.expires_at,
        greatest(draft.available_at, pg_catalog.now()) OPERATOR(pg_catalog.+) draft.expires_after
    ),
    headers => draft.headers,
    max_attempts => draft.max_attempts,
    notify => draft.notify,
    owner => draft.owner,
    payloads => draft.payloads,
    headers_each => draft.headers_each,
    available_ats => draft.available_ats,
    delays => draft.delays,
    owners => draft.owners
) AS r
