"""The statements on the caller's connection: enqueue, cancel, and the savepoint around them."""

from typing import Final, LiteralString

# Statements on the caller's connection do not trust its search_path: types and operators are qualified too. JSON is
# sent as text, because an asyncpg connection may have the application's own codec for jsonb. Delays are added to the
# database's clock. With OFFSET 0 every argument is computed once, before PostgreSQL inlines the function.
ENQUEUE: Final[LiteralString] = """
SELECT pg_catalog.abs(r.receipt) AS id, r.receipt OPERATOR(pg_catalog.<) 0 AS duplicate
FROM (
    SELECT pgoutbox.enqueue_receipt(
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
        notify => draft.notify
    ) AS receipt
    FROM (
        SELECT
            %s::pg_catalog.text AS topic,
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
            %s::pg_catalog.bool AS notify
        OFFSET 0
    ) AS draft
) AS r
"""

# Arrays of texts are sent as one text, because drivers write arrays slowly. Topics and payloads, which every message
# has, are sent as lines: neither can contain a line feed. The answer is one row of two texts: the ids in the order of
# the items, and the positions of the duplicates.
ENQUEUE_MANY: Final[LiteralString] = """
SELECT
    pg_catalog.string_agg(r.id::pg_catalog.text, ',' ORDER BY r.item_index),
    pg_catalog.string_agg(r.item_index::pg_catalog.text, ',') FILTER (WHERE r.duplicate)
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
        %s::pg_catalog.text::pg_catalog.text[] AS coalesce_rules,
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
    coalesce_rules => draft.coalesce_rules,
    notify => draft.notify
) AS r
"""

ENQUEUE_FANOUT: Final[LiteralString] = """
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
        %s::pg_catalog.bool AS notify
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
    notify => draft.notify
) AS r
"""

CANCEL: Final[LiteralString] = """
SELECT target.id, pgoutbox.cancel(target.id)
FROM (SELECT %s::pg_catalog.int8 AS id) AS target
WHERE target.id IS NOT NULL
UNION ALL
SELECT r.id, r.result
FROM pgoutbox.cancel_by_key(
    topic => %s::pg_catalog.text,
    coalesce_key => %s::pg_catalog.text,
    dedupe_key => %s::pg_catalog.text
) AS r
"""

# The name is pgoutbox's own, so that it never hides a savepoint of the caller.
SAVEPOINT: Final[LiteralString] = "SAVEPOINT pgoutbox_best_effort"
RELEASE_SAVEPOINT: Final[LiteralString] = "RELEASE SAVEPOINT pgoutbox_best_effort"
ROLL_BACK_TO_SAVEPOINT: Final[LiteralString] = "ROLLBACK TO SAVEPOINT pgoutbox_best_effort"
