"""Every statement that pgoutbox runs, named. Nothing here is built at run time, and `store` alone runs it.

Rules that hold in every statement: all names are qualified; time is the database's `now()`; whoever writes about a
message names the state and the attempt it expects; a row that another session has locked is skipped, not waited for,
because a wait that ends with the row in another partition fails with 40001. Locks are taken in the order breaker,
coalesce, message, queue.
"""

from typing import Final, LiteralString

# --- enqueue ----------------------------------------------------------------------------------------------------------

# What runs on the caller's connection trusts nothing of its search_path: types and operators are qualified too. JSON
# travels as text, because an asyncpg connection may carry its owner's own codec for jsonb. Delays are added to the
# database's clock. OFFSET 0 has every argument computed once, before the function's body takes the place of the call.
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
            %s::pg_catalog.bool AS notify
        OFFSET 0
    ) AS draft
) AS r
"""

# Topics and payloads, which every message has, travel as lines of one text: neither can hold a line feed, and drivers
# are slow at writing arrays.
ENQUEUE_MANY: Final[LiteralString] = """
SELECT r.item_index, r.id, r.duplicate
FROM (
    SELECT
        pg_catalog.string_to_array(%s::pg_catalog.text, pg_catalog.chr(10)) AS topics,
        pg_catalog.string_to_array(%s::pg_catalog.text, pg_catalog.chr(10))::pg_catalog.jsonb[] AS payloads,
        %s::pg_catalog.text[] AS queues,
        %s::pg_catalog.text[] AS destinations,
        %s::pg_catalog.text[] AS coalesce_keys,
        %s::pg_catalog.text[] AS dedupe_keys,
        %s::pg_catalog.timestamptz[] AS available_ats,
        %s::pg_catalog.float8[] AS delays,
        %s::pg_catalog.timestamptz[] AS expires_ats,
        %s::pg_catalog.float8[] AS expires_afters,
        %s::pg_catalog.text[]::pg_catalog.jsonb[] AS headers,
        %s::pg_catalog.int4[] AS max_attempts,
        %s::pg_catalog.text[] AS ordering_keys,
        %s::pg_catalog.text[] AS on_failed,
        %s::pg_catalog.float8[] AS max_delays,
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
FROM (
    SELECT %s::pg_catalog.int8 AS id
    UNION ALL
    SELECT head.newest_id
    FROM pgoutbox.coalesce AS head
    WHERE head.topic OPERATOR(pg_catalog.=) %s::pg_catalog.text
        AND head.coalesce_key OPERATOR(pg_catalog.=) %s::pg_catalog.text
    UNION ALL
    SELECT d.message_id
    FROM pgoutbox.dedupe AS d
    WHERE d.topic OPERATOR(pg_catalog.=) %s::pg_catalog.text
        AND d.dedupe_key OPERATOR(pg_catalog.=) %s::pg_catalog.text
) AS target
WHERE target.id IS NOT NULL
"""

# The name is pgoutbox's own, so that it never hides a savepoint of the caller.
SAVEPOINT: Final[LiteralString] = "SAVEPOINT pgoutbox_best_effort"
RELEASE_SAVEPOINT: Final[LiteralString] = "RELEASE SAVEPOINT pgoutbox_best_effort"
ROLL_BACK_TO_SAVEPOINT: Final[LiteralString] = "ROLLBACK TO SAVEPOINT pgoutbox_best_effort"

# --- sessions ---------------------------------------------------------------------------------------------------------

# The role's or the database's defaults must not change what a statement means. The planner settings pin the one plan
# that stays fast whatever the statistics say: nested loops over the lanes' indexes and the primary key. Sessions that
# wait for work are idle; and PostgreSQL before version 17 does not know transaction_timeout.
PREPARE_SESSION: Final[LiteralString] = """
SELECT
    set_config('default_transaction_isolation', 'read committed', false),
    set_config('default_transaction_deferrable', 'off', false),
    set_config('statement_timeout', %(statement_timeout)s::text, false),
    set_config('lock_timeout', %(lock_timeout)s::text, false),
    set_config('idle_in_transaction_session_timeout', '60s', false),
    set_config('idle_session_timeout', '0', false),
    CASE
        WHEN current_setting('transaction_timeout', true) IS NOT NULL THEN set_config('transaction_timeout', '0', false)
    END,
    set_config('search_path', 'pg_catalog, pg_temp', false),
    set_config('plan_cache_mode', 'force_generic_plan', false),
    set_config('enable_seqscan', 'off', false),
    set_config('enable_bitmapscan', 'off', false),
    set_config('enable_hashjoin', 'off', false),
    set_config('enable_mergejoin', 'off', false),
    set_config('jit', 'off', false)
"""

PREPARE_TRANSACTION: Final[LiteralString] = """
SELECT
    set_config('statement_timeout', %(statement_timeout)s::text, true),
    set_config('lock_timeout', %(lock_timeout)s::text, true),
    CASE
        WHEN current_setting('transaction_timeout', true) IS NOT NULL THEN set_config('transaction_timeout', '0', true)
    END,
    set_config('search_path', 'pg_catalog, pg_temp', true),
    set_config('enable_seqscan', 'off', true),
    set_config('enable_bitmapscan', 'off', true),
    set_config('enable_hashjoin', 'off', true),
    set_config('enable_mergejoin', 'off', true),
    set_config('jit', 'off', true)
"""

BEGIN: Final[LiteralString] = "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE"

BACKEND_PID: Final[LiteralString] = "SELECT pg_backend_pid()"

SERVER_FACTS: Final[LiteralString] = """
SELECT
    current_setting('server_version_num')::integer AS server_version,
    pg_is_in_recovery() AS in_recovery,
    current_setting('transaction_read_only')::boolean AS read_only,
    current_setting('server_encoding') AS encoding,
    to_regprocedure('pgoutbox.schema_version()') IS NOT NULL AS has_schema
"""

SCHEMA_VERSION: Final[LiteralString] = "SELECT pgoutbox.schema_version()"

# --- claim ------------------------------------------------------------------------------------------------------------

# A claim in its parts, of which three statements are made. How many attempts may begin:
_PERMIT: Final[LiteralString] = """
WITH permit AS MATERIALIZED (
    SELECT
        p.count,
        EXISTS (
            SELECT
            FROM pgoutbox.queue AS q
            WHERE q.name = %(queue)s::text AND num_nonnulls(q.rate_count, q.max_in_flight) > 0
        ) AS is_limited
    FROM pgoutbox.permits(%(queue)s::text, %(total)s::bigint) AS p(count)
)"""

# What was never attempted:
_FRESH_LANE: Final[LiteralString] = """, fresh AS MATERIALIZED (
    SELECT
        m.id,
        m.topic,
        m.coalesce_key,
        m.state,
        m.attempt_count,
        m.max_attempts,
        m.expires_at,
        m.cancel_requested_at,
        m.claimed_at,
        m.worker,
        m.available_at AS due_at
    FROM pgoutbox.message_live AS m
    WHERE m.queue = %(queue)s::text
        AND m.attempt_count = 0
        AND m.ordering_key IS NULL
        AND m.available_at <= now()
        AND (m.available_at, m.id) > (coalesce(%(fresh_floor)s::timestamptz, '-infinity'), %(fresh_floor_id)s::bigint)
        AND m.topic = ANY (%(topics)s::text[])
        -- One in flight for each key: what is not superseded waits until its predecessor is done with.
        AND (
            m.coalesce_key IS NULL
            OR NOT EXISTS (
                SELECT
                FROM pgoutbox.message_live AS sibling
                WHERE sibling.topic = m.topic
                    AND sibling.coalesce_key = m.coalesce_key
                    AND sibling.state = 'sending'
                    AND sibling.id <> m.id
            )
            OR EXISTS (
                SELECT
                FROM pgoutbox.coalesce AS head
                WHERE head.topic = m.topic AND head.coalesce_key = m.coalesce_key AND head.newest_id > m.id
            )
        )
    ORDER BY m.available_at, m.id
    LIMIT (SELECT CASE WHEN p.is_limited THEN p.count ELSE %(fresh_limit)s::bigint END FROM permit AS p)
    FOR UPDATE OF m SKIP LOCKED
)"""

# Lost attempts and retries, as far as there is room.
_OTHER_LANES: Final[LiteralString] = """, first_lapsed AS MATERIALIZED (
    -- Where two scans begin that would each wade through the dead index entries before it; mostly there is none.
    SELECT m.lease_expires_at, m.id
    FROM pgoutbox.message_live AS m
    WHERE m.queue = %(queue)s::text
        AND m.state = 'sending'
        AND m.lease_expires_at <= now()
    ORDER BY m.lease_expires_at, m.id
    LIMIT 1
), ending AS MATERIALIZED (
    -- Lost attempts whose message is not tried again. Apart, because nothing that ends waits for suspects: a
    -- newer message of its key may wait for it.
    SELECT
        m.id,
        m.topic,
        m.coalesce_key,
        m.state,
        m.attempt_count,
        m.max_attempts,
        m.expires_at,
        m.cancel_requested_at,
        m.claimed_at,
        m.worker,
        m.lease_expires_at AS due_at
    FROM pgoutbox.message_live AS m
    WHERE m.queue = %(queue)s::text
        AND m.state = 'sending'
        AND m.lease_expires_at <= now()
        AND (m.lease_expires_at, m.id)
            >= ((SELECT f.lease_expires_at FROM first_lapsed AS f), (SELECT f.id FROM first_lapsed AS f))
        AND m.topic = ANY (%(topics)s::text[])
        AND (
            m.attempt_count >= m.max_attempts
            OR m.cancel_requested_at IS NOT NULL
            OR m.expires_at <= now()
            OR m.topic = ANY (%(hold_topics)s::text[])
            OR EXISTS (
                SELECT
                FROM pgoutbox.coalesce AS head
                WHERE head.topic = m.topic AND head.coalesce_key = m.coalesce_key AND head.newest_id > m.id
            )
        )
    ORDER BY m.lease_expires_at, m.id
    LIMIT (
        SELECT CASE WHEN p.count > 0 THEN %(total)s::bigint - (SELECT count(*) FROM fresh) ELSE 0 END
        FROM permit AS p
    )
    FOR UPDATE OF m SKIP LOCKED
), suspects AS MATERIALIZED (
    -- The others may have ended their process: they come by `suspect_limit`, alone or with such as can afford it.
    SELECT
        m.id,
        m.topic,
        m.coalesce_key,
        m.state,
        m.attempt_count,
        m.max_attempts,
        m.expires_at,
        m.cancel_requested_at,
        m.claimed_at,
        m.worker,
        m.lease_expires_at AS due_at
    FROM pgoutbox.message_live AS m
    WHERE m.queue = %(queue)s::text
        AND m.state = 'sending'
        AND m.lease_expires_at <= now()
        AND (m.lease_expires_at, m.id)
            >= ((SELECT f.lease_expires_at FROM first_lapsed AS f), (SELECT f.id FROM first_lapsed AS f))
        AND m.topic = ANY (%(topics)s::text[])
        AND m.id <> ALL (ARRAY(SELECT e.id FROM ending AS e))
        AND (
            %(suspect_limit)s::bigint = 1
            OR (m.max_attempts - m.attempt_count) * 2 > m.attempt_budget
        )
    ORDER BY m.lease_expires_at, m.id
    LIMIT (
        SELECT least(
            %(suspect_limit)s::bigint,
            CASE
                WHEN p.is_limited THEN p.count
                ELSE %(total)s::bigint - (SELECT count(*) FROM fresh) - (SELECT count(*) FROM ending)
            END
        )
        FROM permit AS p
    )
    FOR UPDATE OF m SKIP LOCKED
), retries AS MATERIALIZED (
    SELECT
        m.id,
        m.topic,
        m.coalesce_key,
        m.state,
        m.attempt_count,
        m.max_attempts,
        m.expires_at,
        m.cancel_requested_at,
        m.claimed_at,
        m.worker,
        m.available_at AS due_at
    FROM pgoutbox.message_live AS m
    WHERE m.queue = %(queue)s::text
        AND m.state = 'pending'
        AND m.attempt_count > 0
        AND m.ordering_key IS NULL
        AND m.available_at <= now()
        AND (m.available_at, m.id) > (coalesce(%(retry_floor)s::timestamptz, '-infinity'), %(retry_floor_id)s::bigint)
        AND m.topic = ANY (%(topics)s::text[])
        AND (
            m.coalesce_key IS NULL
            OR NOT EXISTS (
                SELECT
                FROM pgoutbox.message_live AS sibling
                WHERE sibling.topic = m.topic
                    AND sibling.coalesce_key = m.coalesce_key
                    AND sibling.state = 'sending'
                    AND sibling.id <> m.id
            )
            OR EXISTS (
                SELECT
                FROM pgoutbox.coalesce AS head
                WHERE head.topic = m.topic AND head.coalesce_key = m.coalesce_key AND head.newest_id > m.id
            )
        )
    ORDER BY m.available_at, m.id
    LIMIT (
        SELECT CASE
            WHEN p.is_limited THEN p.count
            ELSE %(total)s::bigint
                - (SELECT count(*) FROM fresh) - (SELECT count(*) FROM ending) - (SELECT count(*) FROM suspects)
        END
        FROM permit AS p
    )
    FOR UPDATE OF m SKIP LOCKED
), candidate AS (
    SELECT * FROM ending
    UNION ALL (
        SELECT *
        FROM (
            SELECT * FROM fresh
            UNION ALL SELECT * FROM suspects
            UNION ALL SELECT * FROM retries
        ) AS c
        ORDER BY c.due_at, c.id
        LIMIT (SELECT p.count FROM permit AS p)
    )
)"""

# What becomes of each: an attempt with a lease, or its end.
_JUDGE: Final[LiteralString] = """, judged AS MATERIALIZED (
    SELECT
        l.id,
        l.due_at,
        l.state AS former_state,
        l.attempt_count AS former_attempt_count,
        l.worker AS former_worker,
        l.claimed_at AS former_claimed_at,
        head.newest_id,
        CASE
            WHEN l.cancel_requested_at IS NOT NULL THEN 'cancelled'
            WHEN head.newest_id > l.id THEN 'skipped'
            WHEN l.expires_at <= now() THEN 'skipped'
            WHEN l.attempt_count >= l.max_attempts THEN 'failed'
            WHEN l.state = 'sending' AND l.topic = ANY (%(hold_topics)s::text[]) THEN 'failed'
            ELSE 'sending'
        END AS state
    FROM candidate AS l
    LEFT JOIN pgoutbox.coalesce AS head ON head.topic = l.topic AND head.coalesce_key = l.coalesce_key
    -- The update below enters keys into the index of what is in flight: two claims enter them in one order.
    ORDER BY l.coalesce_key COLLATE "C", l.topic COLLATE "C", l.due_at, l.id
), spent AS (
    UPDATE pgoutbox.queue AS q
    SET tokens = greatest(0, pgoutbox.tokens_of(q) - begun.count),
        tokens_at = clock_timestamp()
    FROM (SELECT count(*) AS count FROM judged AS j WHERE j.state = 'sending') AS begun
    WHERE q.name = %(queue)s::text AND q.rate_count IS NOT NULL AND begun.count > 0
), lost AS (
    INSERT INTO pgoutbox.attempt (message_id, attempt_count, outcome, worker, started_at, ended_at, error)
    SELECT
        j.id,
        j.former_attempt_count,
        'lost',
        j.former_worker,
        j.former_claimed_at,
        now(),
        'lease expired, outcome unknown'
    FROM judged AS j
    WHERE j.former_state = 'sending'
    ON CONFLICT DO NOTHING
)
UPDATE pgoutbox.message AS m
SET state = j.state,
    attempt_count = m.attempt_count + CASE WHEN j.state = 'sending' THEN 1 ELSE 0 END,
    claimed_at = CASE WHEN j.state = 'sending' THEN now() ELSE m.claimed_at END,
    worker = CASE WHEN j.state = 'sending' THEN %(worker)s::text ELSE m.worker END,
    lease_expires_at = CASE
        WHEN j.state = 'sending' THEN now() + make_interval(secs => %(lease_seconds)s::float8)
    END,
    finished_at = CASE WHEN j.state <> 'sending' THEN now() END,
    skip_reason = CASE
        WHEN j.state <> 'skipped' THEN NULL
        WHEN j.newest_id > m.id THEN 'superseded by ' || j.newest_id
        ELSE 'expired'
    END,
    superseded_by = CASE WHEN j.state = 'skipped' AND j.newest_id > m.id THEN j.newest_id END,
    last_error = CASE
        WHEN j.former_state = 'sending'
            THEN 'attempt ' || j.former_attempt_count || ': lease of ' || j.former_worker || ' expired, outcome unknown'
        ELSE m.last_error
    END
FROM judged AS j
WHERE m.id = j.id
    AND m.state IN ('pending', 'sending')
    AND m.attempt_count = j.former_attempt_count
RETURNING
    m.id,
    m.topic,
    m.queue,
    m.destination,
    m.payload::text AS payload_json,
    m.headers::text AS headers_json,
    m.attempt_count,
    m.max_attempts,
    m.attempt_budget,
    m.created_at,
    m.available_at,
    m.coalesce_key,
    m.ordering_key,
    m.content_id,
    m.state,
    j.former_state,
    j.former_attempt_count,
    j.due_at,
    (SELECT p.is_limited FROM permit AS p) AS is_limited,
    EXISTS (
        SELECT FROM pgoutbox.message_live AS o WHERE o.queue = %(queue)s::text AND o.ordering_key IS NOT NULL
    ) AS has_ordered,
    -- Asked again with a snapshot of its own, when nothing newer can be claimed any more: since this statement began,
    -- another worker may have claimed, delivered and finished a newer message.
    coalesce(
        m.coalesce_key IS NOT NULL
            AND m.state = 'sending'
            AND pgoutbox.newest_id(m.topic, m.coalesce_key) > m.id,
        false
    ) AS superseded
"""

# Takes up to `total` messages of one queue: first up to `fresh_limit` that were never attempted, then, as far as there
# is room, attempts whose lease has ended, and retries. What must not be delivered any more ends here too: one that was
# superseded, cancelled or has expired, and one whose attempts are used up. `now()` and not clock_timestamp(), which,
# being volatile, could not be an index condition.
#
# Of what was lost and is tried again, the suspects, no more than `suspect_limit` come. A limit of 1 takes the one that
# has waited longest. A greater one takes only those that can afford another loss: more than half of the attempts that
# they were granted is left.
#
# Of a queue with a limit, whoever fell due first comes first, from whichever lane, and the tokens are taken in the same
# statement: what crashes between here and the sending has used them up.
CLAIM: Final[LiteralString] = _PERMIT + _FRESH_LANE + _OTHER_LANES + _JUDGE

# The first lane alone, for a worker that was rung: its small plan has a handler start 0.3 ms earlier.
_FRESH_ALONE: Final[LiteralString] = ", candidate AS (SELECT * FROM fresh)"
CLAIM_FRESH: Final[LiteralString] = _PERMIT + _FRESH_LANE + _FRESH_ALONE + _JUDGE

# Messages with an ordering key. Only the first of each key is looked at, key by key from `after_key` on, at most
# `key_limit` keys: what it costs does not depend on how many messages wait behind it. The first of a key can be claimed
# if it is due, none of its key is in flight, and none before it has failed and halts the key. One row: what can be
# claimed, where the look ended, and how many keys it saw.
FIND_ORDERED: Final[LiteralString] = """
WITH RECURSIVE visited(ordering_key, number) AS (
    SELECT first.ordering_key, 1
    FROM (
        SELECT m.ordering_key
        FROM pgoutbox.message_live AS m
        WHERE m.queue = %(queue)s::text AND m.ordering_key > %(after_key)s::text COLLATE "C"
        ORDER BY m.ordering_key
        LIMIT 1
    ) AS first
    UNION ALL
    SELECT next.ordering_key, v.number + 1
    FROM visited AS v
    CROSS JOIN LATERAL (
        SELECT m.ordering_key
        FROM pgoutbox.message_live AS m
        WHERE m.queue = %(queue)s::text AND m.ordering_key > v.ordering_key
        ORDER BY m.ordering_key
        LIMIT 1
    ) AS next
    WHERE v.number < %(key_limit)s::integer
)
SELECT
    array_agg(first.id) FILTER (
        WHERE first.state = 'pending'
            AND first.available_at <= now()
            AND first.topic = ANY (%(topics)s::text[])
            AND NOT EXISTS (
                SELECT
                FROM pgoutbox.message_live AS sibling
                WHERE sibling.queue = %(queue)s::text
                    AND sibling.ordering_key = v.ordering_key
                    AND sibling.state = 'sending'
            )
            AND NOT EXISTS (
                SELECT
                FROM pgoutbox.message_failed AS f
                WHERE f.queue = %(queue)s::text
                    AND f.ordering_key = v.ordering_key
                    AND f.on_failed = 'halt'
                    AND f.id < first.id
            )
    ),
    max(v.ordering_key),
    count(*)
FROM visited AS v
CROSS JOIN LATERAL (
    SELECT m.id, m.state, m.topic, m.available_at
    FROM pgoutbox.message_live AS m
    WHERE m.queue = %(queue)s::text AND m.ordering_key = v.ordering_key
    ORDER BY m.id
    LIMIT 1
) AS first
"""

# Asks once more what may have changed since they were found. Whatever two claims see, only one message of a key can be
# in flight: message_live_ordered_in_flight.
_ORDERED_LANE: Final[LiteralString] = """, candidate AS MATERIALIZED (
    SELECT
        m.id,
        m.topic,
        m.coalesce_key,
        m.state,
        m.attempt_count,
        m.max_attempts,
        m.expires_at,
        m.cancel_requested_at,
        m.claimed_at,
        m.worker,
        m.available_at AS due_at
    FROM unnest(%(ids)s::bigint[]) AS found(id)
    JOIN pgoutbox.message_live AS m ON m.id = found.id
    WHERE m.queue = %(queue)s::text
        AND m.state = 'pending'
        AND m.available_at <= now()
        AND NOT EXISTS (
            SELECT
            FROM pgoutbox.message_live AS earlier
            WHERE earlier.queue = m.queue AND earlier.ordering_key = m.ordering_key AND earlier.id < m.id
        )
        AND NOT EXISTS (
            SELECT
            FROM pgoutbox.message_live AS sibling
            WHERE sibling.queue = m.queue AND sibling.ordering_key = m.ordering_key AND sibling.state = 'sending'
        )
    LIMIT (SELECT p.count FROM permit AS p)
    FOR UPDATE OF m SKIP LOCKED
)"""
CLAIM_ORDERED: Final[LiteralString] = _PERMIT + _ORDERED_LANE + _JUDGE

# When the first message of these queues falls due that was not due `since_seconds` ago, in seconds from now; null if
# there is none. What fell due between the snapshots of the last claim and of this statement is in neither of them. In a
# queue with limits messages may be due for long: they are looked at again with the next permit, or soon when there is
# one, because others have the messages or the limit has moved since the claim. Also the queues with ordering keys.
NEXT_DUE: Final[LiteralString] = """
SELECT
    extract(
        epoch FROM min(nullif(
            greatest(
                next.due_at,
                asked.permit_at,
                CASE WHEN asked.is_limited AND next.due_at <= asked.looked_at THEN now() + interval '0.25 s' END
            ),
            'infinity'
        )) - now()
    )::float8,
    array_agg(asked.name) FILTER (
        WHERE EXISTS (
            SELECT FROM pgoutbox.message_live AS o WHERE o.queue = asked.name AND o.ordering_key IS NOT NULL
        )
    )
FROM (
    SELECT
        q.name,
        limited.name IS NOT NULL AS is_limited,
        now() - make_interval(secs => %(since_seconds)s::float8) AS looked_at,
        CASE WHEN limited.name IS NOT NULL THEN pgoutbox.next_permit_at(q.name) END AS permit_at,
        CASE
            WHEN limited.name IS NULL THEN now() - make_interval(secs => %(since_seconds)s::float8)
            ELSE '-infinity'
        END AS since
    FROM unnest(%(queues)s::text[]) AS q(name)
    LEFT JOIN pgoutbox.queue AS limited
        ON limited.name = q.name
        AND num_nonnulls(limited.paused_at, limited.rate_count, limited.max_in_flight) > 0
    OFFSET 0
) AS asked
CROSS JOIN LATERAL (
    SELECT least(
        (
            SELECT m.available_at
            FROM pgoutbox.message_live AS m
            WHERE m.queue = asked.name
                AND m.attempt_count = 0
                AND m.ordering_key IS NULL
                AND m.available_at > asked.since
            ORDER BY m.available_at
            LIMIT 1
        ),
        (
            SELECT m.available_at
            FROM pgoutbox.message_live AS m
            WHERE m.queue = asked.name
                AND m.state = 'pending'
                AND m.attempt_count > 0
                AND m.ordering_key IS NULL
                AND m.available_at > asked.since
            ORDER BY m.available_at
            LIMIT 1
        ),
        (
            -- Of those that wait for their turn, too: at worst a look that finds nothing.
            SELECT m.available_at
            FROM pgoutbox.message_live AS m
            WHERE m.queue = asked.name
                AND m.state = 'pending'
                AND m.ordering_key IS NOT NULL
                AND m.available_at > asked.since
            ORDER BY m.available_at
            LIMIT 1
        ),
        (
            SELECT m.lease_expires_at
            FROM pgoutbox.message_live AS m
            WHERE m.queue = asked.name
                AND m.state = 'sending'
                AND m.lease_expires_at > asked.since
            ORDER BY m.lease_expires_at
            LIMIT 1
        )
    ) AS due_at
) AS next
"""

# --- finish -----------------------------------------------------------------------------------------------------------

# The common case, apart because it is the hot one. The fence is the state and the attempt count. A row that a caller's
# transaction has locked, cancelling it, is left out and asked for again: one row never holds up a batch.
FINISH_SENT_IF_HELD: Final[LiteralString] = """
WITH held AS MATERIALIZED (
    SELECT m.id, m.attempt_count
    FROM unnest(%(ids)s::bigint[], %(attempt_counts)s::integer[]) AS o(id, attempt_count)
    JOIN pgoutbox.message_live AS m ON m.id = o.id
    WHERE m.state = 'sending' AND m.attempt_count = o.attempt_count
    FOR UPDATE OF m SKIP LOCKED
)
UPDATE pgoutbox.message AS m
SET state = 'sent',
    finished_at = now(),
    lease_expires_at = NULL
FROM held AS h
WHERE m.id = h.id
    AND m.state = 'sending'
    AND m.attempt_count = h.attempt_count
RETURNING m.id, m.state
"""

# The same where a rule keeps nothing of what was sent: the row goes at the moment at which it would have become `sent`,
# with the history of its attempts. The rule is asked here, for each row: whoever takes it back is obeyed at once. The
# dedupe key stays, for as long as a rule keeps it: the message was sent, and its repetition is a duplicate.
FINISH_SENT_AND_FORGET_IF_HELD: Final[LiteralString] = """
WITH held AS MATERIALIZED (
    SELECT
        m.id,
        m.attempt_count,
        EXISTS (
            SELECT
            FROM pgoutbox.retention AS r
            WHERE r.topic IN (m.topic, '*')
                AND r.state = 'sent'
                AND r.keep = interval '0'
                AND (
                    r.topic = m.topic
                    OR NOT EXISTS (
                        SELECT FROM pgoutbox.retention AS own WHERE own.topic = m.topic AND own.state = 'sent'
                    )
                )
        ) AS is_forgotten
    FROM unnest(%(ids)s::bigint[], %(attempt_counts)s::integer[]) AS o(id, attempt_count)
    JOIN pgoutbox.message_live AS m ON m.id = o.id
    WHERE m.state = 'sending' AND m.attempt_count = o.attempt_count
    FOR UPDATE OF m SKIP LOCKED
), kept AS (
    UPDATE pgoutbox.message AS m
    SET state = 'sent',
        finished_at = now(),
        lease_expires_at = NULL
    FROM held AS h
    WHERE m.id = h.id
        AND m.state = 'sending'
        AND m.attempt_count = h.attempt_count
        AND NOT h.is_forgotten
    RETURNING m.id, m.state
), forgotten AS (
    DELETE FROM pgoutbox.message_live AS m
    USING held AS h
    WHERE m.id = h.id
        AND m.state = 'sending'
        AND m.attempt_count = h.attempt_count
        AND h.is_forgotten
    RETURNING m.id
), history AS (
    DELETE FROM pgoutbox.attempt AS a
    USING forgotten AS f
    WHERE a.message_id = f.id
)
SELECT k.id, k.state FROM kept AS k
UNION ALL
SELECT f.id, 'sent' FROM forgotten AS f
"""

FORGETS_SENT: Final[LiteralString] = """
SELECT EXISTS (SELECT FROM pgoutbox.retention AS r WHERE r.state = 'sent' AND r.keep = interval '0')
"""

# Every other outcome: what the attempt asks for (retry, snoozed, released, failed, skipped) meets what happened to the
# message meanwhile. A message that would become pending again ends instead when it was cancelled, superseded or has no
# attempt left. Snooze and release do not use up an attempt: they raise the budget, because the count never goes down.
FINISH_IF_HELD: Final[LiteralString] = """
WITH outcome AS (
    SELECT o.id, o.attempt_count, o.outcome, o.reason, o.delay_seconds
    FROM unnest(
        %(ids)s::bigint[],
        %(attempt_counts)s::integer[],
        %(outcomes)s::text[],
        %(reasons)s::text[],
        %(delays)s::float8[]
    ) AS o(id, attempt_count, outcome, reason, delay_seconds)
), held AS MATERIALIZED (
    SELECT
        o.id,
        o.attempt_count,
        o.outcome,
        o.reason,
        o.delay_seconds,
        head.newest_id,
        CASE
            WHEN o.outcome IN ('failed', 'skipped') THEN o.outcome
            WHEN m.cancel_requested_at IS NOT NULL THEN 'cancelled'
            WHEN head.newest_id > o.id THEN 'skipped'
            WHEN o.outcome = 'retry' AND o.attempt_count >= m.max_attempts THEN 'failed'
            ELSE 'pending'
        END AS state
    FROM outcome AS o
    JOIN pgoutbox.message_live AS m ON m.id = o.id
    LEFT JOIN pgoutbox.coalesce AS head ON head.topic = m.topic AND head.coalesce_key = m.coalesce_key
    WHERE m.state = 'sending' AND m.attempt_count = o.attempt_count
    FOR UPDATE OF m SKIP LOCKED
), finished AS (
    UPDATE pgoutbox.message AS m
    SET state = h.state,
        available_at = CASE
            WHEN h.state = 'pending' AND h.outcome <> 'released'
                THEN now() + make_interval(secs => h.delay_seconds)
            ELSE m.available_at
        END,
        lease_expires_at = NULL,
        finished_at = CASE WHEN h.state <> 'pending' THEN now() END,
        max_attempts = m.max_attempts + CASE WHEN h.outcome IN ('snoozed', 'released') THEN 1 ELSE 0 END,
        skip_reason = CASE
            WHEN h.state <> 'skipped' THEN NULL
            WHEN h.outcome = 'skipped' THEN h.reason
            ELSE 'superseded by ' || h.newest_id
        END,
        superseded_by = CASE WHEN h.state = 'skipped' AND h.outcome <> 'skipped' THEN h.newest_id END,
        last_error = CASE WHEN h.outcome IN ('retry', 'failed') THEN h.reason ELSE m.last_error END
    FROM held AS h
    WHERE m.id = h.id
        AND m.state = 'sending'
        AND m.attempt_count = h.attempt_count
    RETURNING m.id, m.state, m.attempt_count, m.worker, m.claimed_at
), history AS (
    INSERT INTO pgoutbox.attempt (message_id, attempt_count, outcome, worker, started_at, ended_at, error)
    SELECT
        f.id,
        f.attempt_count,
        CASE WHEN f.state = 'pending' THEN h.outcome ELSE f.state END,
        f.worker,
        f.claimed_at,
        now(),
        h.reason
    FROM finished AS f
    JOIN held AS h ON h.id = f.id
    ON CONFLICT DO NOTHING
)
SELECT f.id, f.state
FROM finished AS f
"""

# Where the messages of these attempts stand, unless a later attempt has begun: what a finish that wrote less than it
# was asked to write wants to know. `sending` means that the row was locked; any other state, that an earlier try of
# the same finish was committed and its answer lost.
STANDING: Final[LiteralString] = """
SELECT m.id, m.state
FROM unnest(%(ids)s::bigint[], %(attempt_counts)s::integer[]) AS o(id, attempt_count)
JOIN pgoutbox.message AS m ON m.id = o.id
WHERE m.attempt_count = o.attempt_count
"""

# Newer messages of the same keys had to wait for these attempts. Asked after they are committed, because one that was
# enqueued while they were being finished has found them still in flight.
QUEUES_OF_SUCCESSORS: Final[LiteralString] = """
SELECT DISTINCT m.queue
FROM unnest(%(ids)s::bigint[], %(topics)s::text[], %(coalesce_keys)s::text[]) AS done(id, topic, coalesce_key)
JOIN pgoutbox.coalesce AS head ON head.topic = done.topic AND head.coalesce_key = done.coalesce_key
JOIN pgoutbox.message_live AS m ON m.id = head.newest_id
WHERE head.newest_id > done.id AND m.state = 'pending' AND m.available_at <= now()
"""

# --- lease ------------------------------------------------------------------------------------------------------------

# One row per attempt that still holds its message. A row that a caller's transaction has locked, cancelling it, is not
# renewed; nobody else can claim it either.
RENEW_IF_HELD: Final[LiteralString] = """
WITH asked AS (
    SELECT a.id, a.attempt_count
    FROM unnest(%(ids)s::bigint[], %(attempt_counts)s::integer[]) AS a(id, attempt_count)
), locked AS MATERIALIZED (
    SELECT m.id, m.attempt_count
    FROM asked AS a
    JOIN pgoutbox.message_live AS m ON m.id = a.id
    WHERE m.state = 'sending' AND m.attempt_count = a.attempt_count
    FOR UPDATE OF m SKIP LOCKED
), renewed AS (
    UPDATE pgoutbox.message_live AS m
    SET lease_expires_at = now() + make_interval(secs => %(lease_seconds)s::float8)
    FROM locked AS l
    WHERE m.id = l.id AND m.state = 'sending' AND m.attempt_count = l.attempt_count
    RETURNING m.id
)
SELECT
    m.id,
    m.cancel_requested_at IS NOT NULL AS cancelled,
    coalesce(head.newest_id > m.id, false) AS superseded,
    r.id IS NOT NULL OR m.lease_expires_at > now() AS in_lease
FROM asked AS a
JOIN pgoutbox.message_live AS m ON m.id = a.id
LEFT JOIN pgoutbox.coalesce AS head ON head.topic = m.topic AND head.coalesce_key = m.coalesce_key
LEFT JOIN renewed AS r ON r.id = m.id
WHERE m.state = 'sending' AND m.attempt_count = a.attempt_count
"""

# The same answer without the write.
WATCH_IF_HELD: Final[LiteralString] = """
SELECT
    m.id,
    m.cancel_requested_at IS NOT NULL AS cancelled,
    coalesce(head.newest_id > m.id, false) AS superseded,
    m.lease_expires_at > now() AS in_lease
FROM unnest(%(ids)s::bigint[], %(attempt_counts)s::integer[]) AS a(id, attempt_count)
JOIN pgoutbox.message_live AS m ON m.id = a.id
LEFT JOIN pgoutbox.coalesce AS head ON head.topic = m.topic AND head.coalesce_key = m.coalesce_key
WHERE m.state = 'sending' AND m.attempt_count = a.attempt_count
"""

# --- breaker ----------------------------------------------------------------------------------------------------------

# A row that nobody has probed for long after its time has nothing to say: whatever was held back went out otherwise, or
# is gone. It is opened anew like one that was never there.

# One failure of a destination that this worker holds to be alive. `trips` says that by its own count it is dead: then
# it is opened here, unless somebody else was first, and one answer has `opened`. No answer: it is not open, or another
# session opened it within this very moment, which asking again would tell. The announcement is part of the statement.
BREAKER_FAILED: Final[LiteralString] = """
WITH opened AS (
    INSERT INTO pgoutbox.breaker AS b (key, opened_at, retry_at, cooldown_seconds, worker, last_error)
    SELECT
        %(key)s::text,
        now(),
        now() + make_interval(secs => %(cooldown_seconds)s::float8),
        %(cooldown_seconds)s::float8,
        %(worker)s::text,
        %(error)s::text
    WHERE %(trips)s::boolean
    ON CONFLICT ON CONSTRAINT breaker_pkey DO UPDATE
    SET opened_at = EXCLUDED.opened_at,
        retry_at = EXCLUDED.retry_at,
        cooldown_seconds = EXCLUDED.cooldown_seconds,
        probe_id = NULL,
        probe_until = NULL,
        worker = EXCLUDED.worker,
        last_error = EXCLUDED.last_error
    WHERE greatest(b.retry_at, b.probe_until) < now() - make_interval(secs => %(forget_seconds)s::float8)
    RETURNING b.key, b.opened_at, b.retry_at, b.cooldown_seconds, b.last_error
), announced AS MATERIALIZED (
    SELECT pgoutbox.enqueue(
        topic => 'pgoutbox.alert',
        payload => jsonb_build_object(
            'breaker', o.key, 'event', 'opened', 'opened_at', o.opened_at, 'error', o.last_error
        ),
        queue => %(alert_queue)s::text,
        destination => %(alert_destination)s::text,
        coalesce_key => left(o.key, 128)
    ) AS id
    FROM opened AS o
    WHERE %(alert_queue)s::text IS NOT NULL
)
SELECT
    extract(epoch FROM o.retry_at - now())::float8 AS retry_seconds,
    o.cooldown_seconds,
    o.last_error,
    true AS opened,
    NULL AS probe_id
FROM opened AS o
LEFT JOIN announced AS a ON a.id IS NOT NULL
UNION ALL
SELECT
    extract(epoch FROM b.retry_at - now())::float8,
    b.cooldown_seconds,
    b.last_error,
    false,
    NULL
FROM pgoutbox.breaker AS b
WHERE b.key = %(key)s::text
    AND greatest(b.retry_at, b.probe_until) >= now() - make_interval(secs => %(forget_seconds)s::float8)
"""

# Asks to send one message to a destination that is open, now that its time has come: one session of all gets the
# `probe_id`. The others are told when to ask again; no answer means that it is closed.
BREAKER_PROBE: Final[LiteralString] = """
WITH won AS (
    UPDATE pgoutbox.breaker AS b
    SET probe_id = gen_random_uuid(),
        probe_until = now() + make_interval(secs => %(probe_seconds)s::float8),
        worker = %(worker)s::text
    WHERE b.key = %(key)s::text
        AND b.retry_at <= now()
        AND (b.probe_until IS NULL OR b.probe_until <= now())
    RETURNING b.probe_id, b.retry_at, b.cooldown_seconds, b.last_error
)
SELECT
    extract(epoch FROM w.retry_at - now())::float8 AS retry_seconds,
    w.cooldown_seconds,
    w.last_error,
    false AS opened,
    w.probe_id::text AS probe_id
FROM won AS w
UNION ALL
SELECT
    extract(epoch FROM b.retry_at - now())::float8,
    b.cooldown_seconds,
    b.last_error,
    false,
    NULL
FROM pgoutbox.breaker AS b
WHERE b.key = %(key)s::text AND NOT EXISTS (SELECT FROM won)
"""

# The probe arrived. Its id is the fence: a probe that was given up, or whose row an operator has set back, closes
# nothing.
BREAKER_CLOSE_IF_PROBING: Final[LiteralString] = """
WITH closed AS (
    DELETE FROM pgoutbox.breaker AS b
    WHERE b.key = %(key)s::text AND b.probe_id = %(probe_id)s::uuid
    RETURNING b.key, b.opened_at, b.last_error
), announced AS MATERIALIZED (
    SELECT pgoutbox.enqueue(
        topic => 'pgoutbox.alert',
        payload => jsonb_build_object(
            'breaker', c.key, 'event', 'closed', 'opened_at', c.opened_at, 'error', c.last_error, 'closed_at', now()
        ),
        queue => %(alert_queue)s::text,
        destination => %(alert_destination)s::text,
        coalesce_key => left(c.key, 128)
    ) AS id
    FROM closed AS c
    WHERE %(alert_queue)s::text IS NOT NULL
)
SELECT extract(epoch FROM now() - c.opened_at)::float8 AS open_seconds
FROM closed AS c
LEFT JOIN announced AS a ON a.id IS NOT NULL
"""

# The probe failed: twice the pause, up to a limit.
BREAKER_REOPEN_IF_PROBING: Final[LiteralString] = """
UPDATE pgoutbox.breaker AS b
SET retry_at = now() + make_interval(secs => least(b.cooldown_seconds * 2, %(max_cooldown_seconds)s::float8)),
    cooldown_seconds = least(b.cooldown_seconds * 2, %(max_cooldown_seconds)s::float8),
    probe_id = NULL,
    probe_until = NULL,
    last_error = %(error)s::text
WHERE b.key = %(key)s::text AND b.probe_id = %(probe_id)s::uuid
RETURNING
    extract(epoch FROM b.retry_at - now())::float8 AS retry_seconds,
    b.cooldown_seconds,
    b.last_error,
    false AS opened,
    NULL AS probe_id
"""

# The probe told nothing: somebody else may try at once.
BREAKER_RELEASE_IF_PROBING: Final[LiteralString] = """
UPDATE pgoutbox.breaker AS b
SET probe_id = NULL,
    probe_until = NULL
WHERE b.key = %(key)s::text AND b.probe_id = %(probe_id)s::uuid
RETURNING b.key
"""

# --- doorbell ---------------------------------------------------------------------------------------------------------

LISTEN: Final[LiteralString] = "LISTEN pgoutbox"

UNLISTEN: Final[LiteralString] = "UNLISTEN pgoutbox"

# One answer per queue: armed; sleeper, when another worker has the bell; producers, when enqueuing transactions hold
# it, and the worker must look again until they have committed. A queue that is paused or at its limit is not armed:
# what is enqueued there need not ring before the next permit, in so many seconds, or before somebody resumes the queue.
ARM: Final[LiteralString] = """
SELECT
    q.queue,
    CASE
        WHEN q.permit_at IS NOT NULL THEN 'limited'
        WHEN pg_try_advisory_lock(1885826146, hashtext(q.queue)) THEN 'armed'
        WHEN NOT pg_try_advisory_lock_shared(1885826146, hashtext(q.queue)) THEN 'sleeper'
        WHEN pg_advisory_unlock_shared(1885826146, hashtext(q.queue)) THEN 'producers'
    END,
    extract(epoch FROM nullif(q.permit_at, 'infinity') - clock_timestamp())::float8
FROM (
    SELECT asked.queue, pgoutbox.next_permit_at(asked.queue) AS permit_at
    FROM unnest(%(queues)s::text[]) AS asked(queue)
    OFFSET 0
) AS q
"""

# Other sleepers trust in a bell that is given up here. Each of them is woken to ask for it and to look once more: what
# is committed before somebody has the bell again does not ring.
DISARM: Final[LiteralString] = """
SELECT pg_advisory_unlock(1885826146, hashtext(q.queue)), pg_notify('pgoutbox', q.queue)
FROM unnest(%(queues)s::text[]) AS q(queue)
"""

PROBE: Final[LiteralString] = "SELECT EXISTS (SELECT FROM pg_listening_channels() AS c(name) WHERE c.name = 'pgoutbox')"

# Unlike an enqueue, a worker rings whether or not somebody has the bell: the sleepers it means may have none.
RING: Final[LiteralString] = """
SELECT pg_notify('pgoutbox', q.queue)
FROM unnest(%(queues)s::text[]) AS q(queue)
"""

# --- operators --------------------------------------------------------------------------------------------------------

# Local to the transaction, so that nothing of it stays behind in a pooler's session. A person waits for the answer and
# can interrupt it: the time limit is only there for a terminal that was left alone.
PREPARE_OPERATION: Final[LiteralString] = """
SELECT
    set_config('statement_timeout', '5min', true),
    set_config('lock_timeout', '2s', true),
    set_config('idle_in_transaction_session_timeout', '60s', true),
    CASE
        WHEN current_setting('transaction_timeout', true) IS NOT NULL THEN set_config('transaction_timeout', '0', true)
    END,
    set_config('search_path', 'pg_catalog, pg_temp', true)
"""

LIST_MESSAGES: Final[LiteralString] = """
SELECT
    m.id,
    m.topic,
    m.queue,
    m.destination,
    m.state,
    m.attempt_count,
    m.max_attempts,
    m.created_at,
    m.available_at,
    m.finished_at,
    m.coalesce_key,
    m.dedupe_key,
    m.skip_reason,
    m.last_error
FROM pgoutbox.message AS m
WHERE (%(states)s::text[] IS NULL OR m.state = ANY (%(states)s::text[]))
    AND (%(topic)s::text IS NULL OR m.topic = %(topic)s::text)
    AND (%(queue)s::text IS NULL OR m.queue = %(queue)s::text)
    AND (%(destination)s::text IS NULL OR m.destination = %(destination)s::text)
    AND (%(before_id)s::bigint IS NULL OR m.id < %(before_id)s::bigint)
ORDER BY m.id DESC
LIMIT %(limit)s::bigint
"""

SHOW_MESSAGE: Final[LiteralString] = """
SELECT
    m.id,
    m.topic,
    m.queue,
    m.destination,
    m.state,
    m.attempt_count,
    m.max_attempts,
    m.created_at,
    m.available_at,
    m.expires_at,
    m.claimed_at,
    m.lease_expires_at,
    m.cancel_requested_at,
    m.finished_at,
    m.worker,
    m.coalesce_key,
    m.dedupe_key,
    m.ordering_key,
    m.on_failed,
    m.superseded_by,
    m.resend_of,
    m.content_id,
    m.skip_reason,
    m.last_error,
    m.headers,
    m.payload
FROM pgoutbox.message AS m
WHERE m.id = %(id)s::bigint
"""

SHOW_ATTEMPTS: Final[LiteralString] = """
SELECT
    a.attempt_count,
    a.outcome,
    a.worker,
    a.started_at,
    a.ended_at,
    a.error
FROM pgoutbox.attempt AS a
WHERE a.message_id = %(id)s::bigint
ORDER BY a.attempt_count
"""

STATS: Final[LiteralString] = """
SELECT
    m.queue,
    m.topic,
    count(*) FILTER (WHERE m.state = 'pending' AND m.available_at <= now()) AS due,
    count(*) FILTER (WHERE m.state = 'pending' AND m.available_at > now()) AS scheduled,
    count(*) FILTER (WHERE m.state = 'sending') AS sending,
    count(*) FILTER (WHERE m.state = 'sent') AS sent,
    count(*) FILTER (WHERE m.state = 'failed') AS failed,
    count(*) FILTER (WHERE m.state = 'skipped') AS skipped,
    count(*) FILTER (WHERE m.state = 'cancelled') AS cancelled,
    extract(
        epoch FROM now() - min(m.available_at) FILTER (WHERE m.state = 'pending' AND m.available_at <= now())
    )::float8 AS oldest_due_seconds
FROM pgoutbox.message AS m
WHERE %(queue)s::text IS NULL OR m.queue = %(queue)s::text
GROUP BY m.queue, m.topic
ORDER BY m.queue, m.topic
"""

# How much work is left that a drain waits for: what is in flight, due, or will be tried again. A message that was
# scheduled for later and never attempted is not waited for.
COUNT_OWED: Final[LiteralString] = """
SELECT count(*)
FROM pgoutbox.message_live AS m
WHERE m.queue = ANY (%(queues)s::text[])
    AND m.topic = ANY (%(topics)s::text[])
    AND (m.attempt_count > 0 OR m.available_at <= now())
    AND NOT EXISTS (
        SELECT
        FROM pgoutbox.message_failed AS f
        WHERE f.queue = m.queue AND f.ordering_key = m.ordering_key AND f.on_failed = 'halt' AND f.id < m.id
    )
    AND NOT EXISTS (
        SELECT
        FROM pgoutbox.queue AS q
        WHERE q.name = m.queue AND q.paused_at IS NOT NULL AND (q.resume_at > now()) IS NOT FALSE
    )
"""

LIST_FAILED_IDS: Final[LiteralString] = """
SELECT m.id
FROM pgoutbox.message AS m
WHERE m.state = 'failed'
    AND (%(topic)s::text IS NULL OR m.topic = %(topic)s::text)
    AND (%(queue)s::text IS NULL OR m.queue = %(queue)s::text)
    AND m.id > %(after_id)s::bigint
ORDER BY m.id
LIMIT %(limit)s::bigint
"""

# The answer names what each id met: its state before, and the newer message if it was superseded.
REDRIVE: Final[LiteralString] = """
WITH asked AS (
    SELECT DISTINCT a.id
    FROM unnest(%(ids)s::bigint[]) AS a(id)
), locked AS MATERIALIZED (
    SELECT m.id, m.state, head.newest_id
    FROM asked AS a
    JOIN pgoutbox.message AS m ON m.id = a.id
    LEFT JOIN pgoutbox.coalesce AS head ON head.topic = m.topic AND head.coalesce_key = m.coalesce_key
    WHERE m.state IN ('failed', 'cancelled')
    ORDER BY m.id
    FOR UPDATE OF m SKIP LOCKED
), redriven AS (
    UPDATE pgoutbox.message AS m
    SET state = 'pending',
        available_at = now(),
        finished_at = NULL,
        cancel_requested_at = NULL,
        max_attempts = m.attempt_count + m.attempt_budget
    FROM locked AS l
    WHERE m.id = l.id
        AND m.state = l.state
        AND m.state IN ('failed', 'cancelled')
        AND coalesce(l.newest_id <= m.id, true)
    RETURNING m.id, m.queue
), rung AS MATERIALIZED (
    SELECT pgoutbox.ring(q.queue)
    FROM (SELECT DISTINCT r.queue FROM redriven AS r) AS q
)
SELECT
    a.id,
    r.id IS NOT NULL AS redriven,
    m.state,
    CASE WHEN head.newest_id > a.id THEN head.newest_id END AS superseded_by,
    (SELECT count(*) FROM rung) AS rung
FROM asked AS a
LEFT JOIN pgoutbox.message AS m ON m.id = a.id
LEFT JOIN pgoutbox.coalesce AS head ON head.topic = m.topic AND head.coalesce_key = m.coalesce_key
LEFT JOIN redriven AS r ON r.id = a.id
ORDER BY a.id
"""

# The head is locked first: between a look at it and the enqueue a newer message could commit, which the copy, drawing
# its id last, would then supersede with older content.
RESEND: Final[LiteralString] = """
WITH head AS MATERIALIZED (
    SELECT c.newest_id
    FROM pgoutbox.message AS m
    JOIN pgoutbox.coalesce AS c ON c.topic = m.topic AND c.coalesce_key = m.coalesce_key
    WHERE m.id = %(id)s::bigint
    FOR UPDATE OF c
)
SELECT
    copy.id,
    m.state,
    CASE WHEN head.newest_id > m.id THEN head.newest_id END AS superseded_by
FROM pgoutbox.message AS m
LEFT JOIN head ON true
LEFT JOIN LATERAL (
    SELECT pgoutbox.enqueue(
        topic => m.topic,
        payload => m.payload,
        queue => m.queue,
        destination => m.destination,
        coalesce_key => m.coalesce_key,
        headers => m.headers,
        max_attempts => m.attempt_budget,
        ordering_key => m.ordering_key,
        on_failed => m.on_failed
    ) AS id
    WHERE m.state = 'sent' AND coalesce(head.newest_id <= m.id, true)
) AS copy ON true
WHERE m.id = %(id)s::bigint
"""

# In the transaction that made the copy, which nobody else can see yet.
MARK_RESEND: Final[LiteralString] = """
UPDATE pgoutbox.message_live AS m
SET resend_of = %(source_id)s::bigint,
    content_id = (SELECT source.content_id FROM pgoutbox.message AS source WHERE source.id = %(source_id)s::bigint)
WHERE m.id = %(id)s::bigint AND m.state = 'pending' AND m.resend_of IS NULL
RETURNING m.id
"""

# Pausing twice keeps the first time, and the end that was said last.
PAUSE_QUEUE: Final[LiteralString] = """
INSERT INTO pgoutbox.queue AS q (name, paused_at, resume_at)
VALUES (%(queue)s::text, now(), now() + make_interval(secs => %(seconds)s::float8))
ON CONFLICT ON CONSTRAINT queue_pkey DO UPDATE
SET paused_at = CASE WHEN q.resume_at <= now() THEN now() ELSE coalesce(q.paused_at, now()) END,
    resume_at = excluded.resume_at
RETURNING q.paused_at, q.resume_at
"""

# Here and below all sleepers are woken, whether or not somebody has the bell: of a paused queue nobody has it.
RESUME_QUEUE: Final[LiteralString] = """
WITH resumed AS (
    UPDATE pgoutbox.queue AS q
    SET paused_at = NULL, resume_at = NULL
    WHERE q.name = %(queue)s::text AND q.paused_at IS NOT NULL
    RETURNING q.name
)
SELECT r.name, pg_notify('pgoutbox', r.name)
FROM resumed AS r
"""

# A bucket begins full. When the rate is changed it keeps what it holds, as far as there is room.
LIMIT_RATE: Final[LiteralString] = """
WITH limited AS (
    INSERT INTO pgoutbox.queue AS q (name, rate_count, rate_seconds, burst, tokens, tokens_at)
    SELECT a.name, a.rate_count, a.rate_seconds, a.burst, a.burst, CASE WHEN a.rate_count IS NOT NULL THEN now() END
    FROM (
        VALUES (%(queue)s::text, %(count)s::integer, %(seconds)s::float8, %(burst)s::integer)
    ) AS a(name, rate_count, rate_seconds, burst)
    ON CONFLICT ON CONSTRAINT queue_pkey DO UPDATE
    SET rate_count = excluded.rate_count,
        rate_seconds = excluded.rate_seconds,
        burst = excluded.burst,
        tokens = CASE
            WHEN excluded.rate_count IS NOT NULL
                THEN least(excluded.tokens, coalesce(pgoutbox.tokens_of(q), excluded.tokens))
        END,
        tokens_at = CASE WHEN excluded.rate_count IS NOT NULL THEN clock_timestamp() END
    RETURNING q.name
)
SELECT l.name, pg_notify('pgoutbox', l.name)
FROM limited AS l
"""

LIMIT_IN_FLIGHT: Final[LiteralString] = """
WITH limited AS (
    INSERT INTO pgoutbox.queue AS q (name, max_in_flight)
    VALUES (%(queue)s::text, %(max_in_flight)s::integer)
    ON CONFLICT ON CONSTRAINT queue_pkey DO UPDATE SET max_in_flight = excluded.max_in_flight
    RETURNING q.name
)
SELECT l.name, pg_notify('pgoutbox', l.name)
FROM limited AS l
"""

# The queues that are paused or have limits. A pause whose end has passed is none.
LIST_QUEUES: Final[LiteralString] = """
SELECT
    q.name,
    q.paused_at,
    q.resume_at,
    q.rate_count,
    q.rate_seconds,
    q.burst,
    pgoutbox.tokens_of(q) AS tokens,
    q.max_in_flight,
    pgoutbox.in_flight_of(q.name, NULL) AS in_flight
FROM pgoutbox.queue AS q
WHERE (q.paused_at IS NOT NULL AND (q.resume_at > now()) IS NOT FALSE)
    OR num_nonnulls(q.rate_count, q.max_in_flight) > 0
ORDER BY q.name
"""

# Ends at the first message of a queue that is known, where the list of all queues reads every message.
UNKNOWN_QUEUES: Final[LiteralString] = """
SELECT asked.queue
FROM unnest(%(queues)s::text[]) AS asked(queue)
WHERE NOT EXISTS (SELECT FROM pgoutbox.queue AS q WHERE q.name = asked.queue)
    AND NOT EXISTS (SELECT FROM pgoutbox.message AS m WHERE m.queue = asked.queue)
ORDER BY asked.queue
"""

KNOWN_QUEUES: Final[LiteralString] = """
SELECT DISTINCT m.queue FROM pgoutbox.message AS m
UNION
SELECT q.name FROM pgoutbox.queue AS q
ORDER BY 1
"""

COUNT_PRUNABLE: Final[LiteralString] = """
SELECT m.state, count(*)
FROM pgoutbox.message AS m
WHERE m.state = ANY (%(states)s::text[])
    AND m.state IN ('sent', 'failed', 'skipped', 'cancelled')
    AND m.finished_at < now() - make_interval(secs => %(older_than_seconds)s::float8)
    AND (%(topic)s::text IS NULL OR m.topic = %(topic)s::text)
GROUP BY m.state
ORDER BY m.state
"""

# What a prune deletes is locked first: a row that a redrive has is left alone, and the state is asked for twice.
_DELETE_OLD: Final[LiteralString] = """, history AS (
    DELETE FROM pgoutbox.attempt AS a
    USING old AS o
    WHERE a.message_id = o.id
), keys AS (
    DELETE FROM pgoutbox.dedupe AS d
    USING old AS o
    WHERE d.topic = o.topic AND d.dedupe_key = o.dedupe_key AND d.message_id = o.id AND NOT o.keeps_dedupe_key
)
DELETE FROM pgoutbox.message AS m
USING old AS o
WHERE m.id = o.id AND m.state = o.state AND m.state IN ('sent', 'failed', 'skipped', 'cancelled')
RETURNING m.state
"""

_PRUNE_BY_AGE: Final[LiteralString] = """
WITH old AS MATERIALIZED (
    SELECT m.id, m.state, m.topic, m.dedupe_key, false AS keeps_dedupe_key
    FROM pgoutbox.message AS m
    WHERE m.state = ANY (%(states)s::text[])
        AND m.state IN ('sent', 'failed', 'skipped', 'cancelled')
        AND m.finished_at < now() - make_interval(secs => %(older_than_seconds)s::float8)
        AND (%(topic)s::text IS NULL OR m.topic = %(topic)s::text)
    LIMIT %(limit)s::bigint
    FOR UPDATE OF m SKIP LOCKED
)"""

# The dedupe key goes with its message, and is free again after that.
PRUNE: Final[LiteralString] = _PRUNE_BY_AGE + _DELETE_OLD

# One rule, as it stands now: a rule that was changed after the list of rules was read is obeyed as it is. A topic's own
# rule keeps its messages from that of all topics, and so does one that keeps for ever.
_PRUNE_BY_RULE: Final[LiteralString] = """
WITH old AS MATERIALIZED (
    SELECT m.id, m.state, m.topic, m.dedupe_key, r.keep = interval '0' AS keeps_dedupe_key
    FROM pgoutbox.retention AS r
    JOIN pgoutbox.message AS m ON m.state = r.state
    WHERE r.topic = %(topic)s::text
        AND r.state = %(state)s::text
        AND m.state = %(state)s::text
        AND m.state IN ('sent', 'failed', 'skipped', 'cancelled')
        AND m.finished_at <= now() - r.keep
        AND (
            m.topic = r.topic
            OR (
                r.topic = '*'
                AND NOT EXISTS (
                    SELECT FROM pgoutbox.retention AS own WHERE own.topic = m.topic AND own.state = r.state
                )
            )
        )
    LIMIT %(limit)s::bigint
    FOR UPDATE OF m SKIP LOCKED
)"""
PRUNE_BY_RULE: Final[LiteralString] = _PRUNE_BY_RULE + _DELETE_OLD

# Keys whose message is deleted, by a rule of their own.
PRUNE_DEDUPE_BY_RULE: Final[LiteralString] = """
WITH old AS MATERIALIZED (
    SELECT d.topic, d.dedupe_key, d.message_id
    FROM pgoutbox.retention AS r
    CROSS JOIN pgoutbox.dedupe AS d
    WHERE r.topic = %(topic)s::text
        AND r.state = 'dedupe_key'
        AND d.created_at <= now() - r.keep
        AND (
            d.topic = r.topic
            OR (
                r.topic = '*'
                AND NOT EXISTS (
                    SELECT FROM pgoutbox.retention AS own WHERE own.topic = d.topic AND own.state = r.state
                )
            )
        )
        AND NOT EXISTS (SELECT FROM pgoutbox.message AS m WHERE m.id = d.message_id)
    LIMIT %(limit)s::bigint
    FOR UPDATE OF d SKIP LOCKED
)
DELETE FROM pgoutbox.dedupe AS d
USING old AS o
WHERE d.topic = o.topic AND d.dedupe_key = o.dedupe_key AND d.message_id = o.message_id
RETURNING d.message_id
"""

# The same by age alone, for those who prune without rules.
PRUNE_DEDUPE: Final[LiteralString] = """
WITH old AS MATERIALIZED (
    SELECT d.topic, d.dedupe_key, d.message_id
    FROM pgoutbox.dedupe AS d
    WHERE d.created_at < now() - make_interval(secs => %(older_than_seconds)s::float8)
        AND (%(topic)s::text IS NULL OR d.topic = %(topic)s::text)
        AND NOT EXISTS (SELECT FROM pgoutbox.message AS m WHERE m.id = d.message_id)
    LIMIT %(limit)s::bigint
    FOR UPDATE OF d SKIP LOCKED
)
DELETE FROM pgoutbox.dedupe AS d
USING old AS o
WHERE d.topic = o.topic AND d.dedupe_key = o.dedupe_key AND d.message_id = o.message_id
RETURNING d.message_id
"""

RETENTION_RULES: Final[LiteralString] = """
SELECT r.topic, r.state, r.keep
FROM pgoutbox.retention AS r
ORDER BY r.topic = '*', r.topic, r.state
"""

SET_RETENTION: Final[LiteralString] = """
INSERT INTO pgoutbox.retention (topic, state, keep)
VALUES (%(topic)s::text, %(state)s::text, make_interval(secs => %(keep_seconds)s::float8))
ON CONFLICT ON CONSTRAINT retention_pkey DO UPDATE SET keep = excluded.keep
RETURNING topic
"""

UNSET_RETENTION: Final[LiteralString] = """
DELETE FROM pgoutbox.retention AS r
WHERE r.topic = %(topic)s::text AND r.state = %(state)s::text
RETURNING r.topic
"""

# A head can be forgotten when every message of its key is gone: ids of one key only grow, so that is certain when its
# newest message is older than the oldest message there is. A head that an open transaction holds is left alone.
PRUNE_COALESCE: Final[LiteralString] = """
WITH forgotten AS MATERIALIZED (
    SELECT head.topic, head.coalesce_key
    FROM pgoutbox.coalesce AS head
    WHERE head.newest_id < coalesce((SELECT min(m.id) FROM pgoutbox.message AS m), 0)
    LIMIT %(limit)s::bigint
    FOR UPDATE OF head SKIP LOCKED
)
DELETE FROM pgoutbox.coalesce AS head
USING forgotten AS f
WHERE head.topic = f.topic AND head.coalesce_key = f.coalesce_key
"""

# The same of ordering keys.
PRUNE_ORDERING: Final[LiteralString] = """
WITH forgotten AS MATERIALIZED (
    SELECT tail.queue, tail.ordering_key
    FROM pgoutbox.ordering AS tail
    WHERE tail.last_id < coalesce((SELECT min(m.id) FROM pgoutbox.message AS m), 0)
    LIMIT %(limit)s::bigint
    FOR UPDATE OF tail SKIP LOCKED
)
DELETE FROM pgoutbox.ordering AS tail
USING forgotten AS f
WHERE tail.queue = f.queue AND tail.ordering_key = f.ordering_key
"""

# A content goes with the last message that names it.
PRUNE_CONTENT: Final[LiteralString] = """
DELETE FROM pgoutbox.content AS c
WHERE c.id IN (
    SELECT unused.id
    FROM pgoutbox.content AS unused
    WHERE NOT EXISTS (SELECT FROM pgoutbox.message AS m WHERE m.content_id = unused.id)
    LIMIT %(limit)s::bigint
)
"""

CONTENTS: Final[LiteralString] = """
SELECT c.id, c.body::text
FROM pgoutbox.content AS c
WHERE c.id = ANY (%(ids)s::bigint[])
"""
