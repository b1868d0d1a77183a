-- Enqueue several messages in the caller's transaction. One row of two texts: the ids in the order of the items, and
-- the positions of the
-- duplicates, each with the state of the message that was found.
-- Arrays of texts are sent as one text, because drivers write arrays slowly. Topics and payloads, which every message
-- has, are sent as lines: neither can contain a line feed. All names are qualified, see enqueue.sql.
SELECT
    pg_catalog.string_agg(r.id::pg_catalog.text, ',' ORDER BY r.item_index),
    pg_catalog.string_agg(
        pg_catalog.concat(r.item_index, ':', pgoutbox._state_of(r.id)), ','
    ) FILTER (WHERE r.duplicate)
FROM (
    SELECT
        pg_catalog.string_to_array(%s::pg_catalog.text, pg_catalog.chr(10)) AS topics,
        pg_catalog.string_to_array(%s::pg_catalog.text, pg_catalog.chr(10))::pg_catalog.jsonb[] AS payloads,
        %s::pg_catalog.text::pg_catalog.text[] AS queues,
        %s::pg_catalog.text::pg_catalog.text[] AS destinations,
        %s::pg_catalog.text::pg_catalog.text[] AS coalesce_keys,
        %s::pg_catalog.text::pg_catalog.text[] AS dedupe_keys,
        %s::pg_catalog.timestamptz[] AS available_ats,
        %s::pg_catalog.float8[] AS delays,
        %s::pg_catalog.timestamptz[] AS expires_ats,
        %s::pg_catalog.float8[] AS expires_afters,
        %s::pg_catalog.text::pg_catalog.text[]::pg_catalog.jsonb[] AS headers,
        %s::pg_catalog.int4[] AS max_attempts,
        %s::pg_catalog.text::pg_catalog.text[] AS ordering_keys,
        %s::pg_catalog.text::pg_catalog.text[] AS on_failed,
        %s::pg_catalog.float8[] AS max_delays,
        %s::pg_catalog.text::pg_catalog.text[] AS owners,
        %s::pg_catalog.text::pg_catalog.text[] AS on_duplicates,
        %s::pg_catalog.bool AS notify
) AS draft
CROSS JOIN LATERAL pgoutbox.enqueue_many(
    topics => draft.topics,
    payloads => draft.payloads,
    queues => draft.queues,
    destinations => draft.destinations,
    coalesce_keys => draft.coalesce_keys,
    dedupe_keys => draft.dedupe_keys,
    available_ats => draft.available_ats,
    delays => draft.delays,
    expires_ats => CASE
        WHEN draft.expires_afters IS NULL THEN draft.expires_ats
        ELSE (
            SELECT pg_catalog.array_agg(
                coalesce(
                    d.expires_at,
                    greatest(
                        d.available_at,
                        pg_catalog.now() OPERATOR(pg_catalog.+) pg_catalog.make_interval(secs => d.delay),
                        pg_catalog.now()
                    ) OPERATOR(pg_catalog.+) pg_catalog.make_interval(secs => d.expires_after)
                )
                ORDER BY d.ordinality
            )
            FROM unnest(draft.available_ats, draft.delays, draft.expires_ats, draft.expires_afters)
                WITH ORDINALITY AS d(available_at, delay, expires_at, expires_after, ordinality)
        )
    END,
    headers => draft.headers,
    max_attempts => draft.max_attempts,
    ordering_keys => draft.ordering_keys,
    on_failed => draft.on_failed,
    max_delays => draft.max_delays,
    owners => draft.owners,
    on_duplicates => draft.on_duplicates,
    notify => draft.notify
) AS r
