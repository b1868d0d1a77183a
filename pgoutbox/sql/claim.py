"""Which messages a worker takes, and when it looks again."""

from typing import Final, LiteralString

# A message is superseded by the rule `pending` only if this claim can lock the newer one while it is pending: whatever
# the snapshot saw, an attempt for the key begins after this claim (docs/decisions/0021).
_NEWER_LOCKED: Final[LiteralString] = """, newer AS MATERIALIZED (
    SELECT n.id
    FROM pgoutbox.message_live AS n
    WHERE n.id = ANY (ARRAY(SELECT c.newer_id FROM candidate AS c WHERE c.newer_id IS NOT NULL))
        AND n.state = 'pending'
        AND n.available_at <= now()
    FOR SHARE OF n SKIP LOCKED
)"""

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
        m.available_at AS due_at,
        CASE
            WHEN m.coalesces_pending THEN pgoutbox.newer_pending(m.topic, m.coalesce_key, m.queue, m.id)
        END AS newer_id
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
            OR (
                NOT EXISTS (
                    SELECT
                    FROM pgoutbox.message_live AS sibling
                    WHERE sibling.topic = m.topic
                        AND sibling.coalesce_key = m.coalesce_key
                        AND sibling.state = 'sending'
                        AND sibling.id <> m.id
                )
                AND CASE
                    WHEN m.coalesces_pending THEN pgoutbox.has_strict_due(m.topic, m.coalesce_key, m.queue)
                END IS NOT TRUE
            )
            OR CASE
                WHEN m.coalesces_pending THEN pgoutbox.newer_pending(m.topic, m.coalesce_key, m.queue, m.id)
            END IS NOT NULL
            OR EXISTS (
                SELECT
                FROM pgoutbox.coalesce AS head
                WHERE head.topic = m.topic AND head.coalesce_key = m.coalesce_key AND head.newest_id > m.id
            )
        )
    ORDER BY m.available_at, m.id
    LIMIT (
        SELECT CASE WHEN p.is_limited THEN p.count ELSE least(%(fresh_limit)s::bigint, p.count) END
        FROM permit AS p
    )
    FOR UPDATE OF m SKIP LOCKED
)"""

# Lost attempts and retries, as far as there is room.
_OTHER_LANES: Final[LiteralString] = """, first_lapsed AS MATERIALIZED (
    -- Where two scans begin that would each wade through the dead index entries before it; mostly there is none.
    SELECT m.lease_expires_at, m.id
    FROM pgoutbox.message_live AS m
    -- None either, after the server's clock has stepped forward: leases that lapse by a step are held by live workers,
    -- which renew them soon.
    WHERE m.queue = %(queue)s::text
        AND m.state = 'sending'
        AND m.lease_expires_at <= now()
        AND now() <= coalesce(%(clock_limit)s::timestamptz, 'infinity')
    ORDER BY m.lease_expires_at, m.id
    LIMIT 1
), ending AS MATERIALIZED (
    -- Lost attempts whose message is not tried again. Apart, because nothing that ends waits for suspects: a
    -- newer message of its key may wait for it. What this worker holds is left alone: after a suspension or an outage
    -- only the leases are lost, and it renews them. Its other attempts are those whose outcome the server has lost.
    -- Where `held` is NULL, no attempt of its own is looked at. A lease may have been renewed beside a locked row.
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
        m.lease_expires_at AS due_at,
        CASE
            WHEN m.coalesces_pending THEN pgoutbox.newer_pending(m.topic, m.coalesce_key, m.queue, m.id)
        END AS newer_id
    FROM pgoutbox.message_live AS m
    WHERE m.queue = %(queue)s::text
        AND m.state = 'sending'
        AND m.lease_expires_at <= now()
        AND (m.lease_expires_at, m.id)
            >= ((SELECT f.lease_expires_at FROM first_lapsed AS f), (SELECT f.id FROM first_lapsed AS f))
        AND m.topic = ANY (%(topics)s::text[])
        AND (m.worker <> %(worker)s::text OR m.id <> ALL (%(held)s::bigint[]))
        AND coalesce(
            (
                SELECT r.lease_expires_at
                FROM pgoutbox.renewal AS r
                WHERE r.message_id = m.id AND r.attempt_count = m.attempt_count AND r.worker = m.worker
            ) <= now(),
            true
        )
        AND (
            m.attempt_count >= m.max_attempts
            OR m.cancel_requested_at IS NOT NULL
            OR m.expires_at <= now()
            OR m.topic = ANY (%(hold_topics)s::text[])
            OR CASE
                WHEN m.coalesces_pending THEN pgoutbox.newer_pending(m.topic, m.coalesce_key, m.queue, m.id)
            END IS NOT NULL
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
        m.lease_expires_at AS due_at,
        CASE
            WHEN m.coalesces_pending THEN pgoutbox.newer_pending(m.topic, m.coalesce_key, m.queue, m.id)
        END AS newer_id
    FROM pgoutbox.message_live AS m
    WHERE m.queue = %(queue)s::text
        AND m.state = 'sending'
        AND m.lease_expires_at <= now()
        AND (m.lease_expires_at, m.id)
            >= ((SELECT f.lease_expires_at FROM first_lapsed AS f), (SELECT f.id FROM first_lapsed AS f))
        AND m.topic = ANY (%(topics)s::text[])
        AND (m.worker <> %(worker)s::text OR m.id <> ALL (%(held)s::bigint[]))
        AND coalesce(
            (
                SELECT r.lease_expires_at
                FROM pgoutbox.renewal AS r
                WHERE r.message_id = m.id AND r.attempt_count = m.attempt_count AND r.worker = m.worker
            ) <= now(),
            true
        )
        AND m.id <> ALL (ARRAY(SELECT e.id FROM ending AS e))
        AND (
            %(suspect_limit)s::bigint = 1
            OR m.max_attempts - m.attempt_count > m.attempt_budget / 2
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
        m.available_at AS due_at,
        CASE
            WHEN m.coalesces_pending THEN pgoutbox.newer_pending(m.topic, m.coalesce_key, m.queue, m.id)
        END AS newer_id
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
            OR (
                NOT EXISTS (
                    SELECT
                    FROM pgoutbox.message_live AS sibling
                    WHERE sibling.topic = m.topic
                        AND sibling.coalesce_key = m.coalesce_key
                        AND sibling.state = 'sending'
                        AND sibling.id <> m.id
                )
                AND CASE
                    WHEN m.coalesces_pending THEN pgoutbox.has_strict_due(m.topic, m.coalesce_key, m.queue)
                END IS NOT TRUE
            )
            OR CASE
                WHEN m.coalesces_pending THEN pgoutbox.newer_pending(m.topic, m.coalesce_key, m.queue, m.id)
            END IS NOT NULL
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

# The columns of every claim.
_COLUMNS: Final[LiteralString] = """    m.id,
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
    m.claimed_at,
    m.state,
    -- Python has no infinite time, and PostgreSQL before 17 no infinite interval.
    CASE WHEN isfinite(m.expires_at) THEN extract(epoch FROM m.expires_at - now())::float8 END AS expires_in_seconds,
    -- Asked again with a snapshot of its own, when nothing newer can be claimed any more: since this statement began,
    -- another worker may have claimed, delivered and finished a newer message.
    coalesce(
        m.coalesce_key IS NOT NULL
            AND m.state = 'sending'
            AND pgoutbox.newest_id(m.topic, m.coalesce_key) > m.id,
        false
    ) AS superseded"""

# What becomes of each: an attempt with a lease, or its end.
_JUDGEMENT: Final[LiteralString] = """, judged AS MATERIALIZED (
    SELECT
        l.id,
        l.due_at,
        l.state AS former_state,
        l.attempt_count AS former_attempt_count,
        l.worker AS former_worker,
        l.claimed_at AS former_claimed_at,
        CASE WHEN head.newest_id > l.id THEN head.newest_id ELSE l.newer_id END AS newer_id,
        CASE
            WHEN l.cancel_requested_at IS NOT NULL THEN 'cancelled'
            WHEN head.newest_id > l.id OR l.newer_id IS NOT NULL THEN 'skipped'
            WHEN l.expires_at <= now() THEN 'skipped'
            WHEN l.attempt_count >= l.max_attempts THEN 'failed'
            WHEN l.state = 'sending' AND l.topic = ANY (%(hold_topics)s::text[]) THEN 'failed'
            ELSE 'sending'
        END AS state
    FROM candidate AS l
    LEFT JOIN pgoutbox.coalesce AS head ON head.topic = l.topic AND head.coalesce_key = l.coalesce_key
    -- While this one is in flight, no other claim can begin the newer one.
    WHERE l.newer_id IS NULL
        OR l.state = 'sending'
        OR head.newest_id > l.id
        OR l.newer_id = ANY (ARRAY(SELECT n.id FROM newer AS n))
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
        ELSE coalesce('superseded by ' || j.newer_id, 'expired')
    END,
    superseded_by = CASE WHEN j.state = 'skipped' THEN j.newer_id END,
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
"""
_FORMER: Final[LiteralString] = """,
    j.former_state,
    j.former_attempt_count,
    (SELECT p.is_limited FROM permit AS p) AS is_limited,
    EXISTS (
        SELECT FROM pgoutbox.message_live AS o WHERE o.queue = %(queue)s::text AND o.ordering_key IS NOT NULL
    ) AS has_ordered
"""
_JUDGE: Final[LiteralString] = _NEWER_LOCKED + _JUDGEMENT + _COLUMNS + _FORMER

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

# The first lane alone, of a queue without limits. A worker asks for it when it was rung, and under load between its
# looks at all lanes. A superseded or expired message ends here, too.
_FRESH: Final[LiteralString] = """
WITH candidate AS MATERIALIZED (
    SELECT
        m.id,
        m.topic,
        m.coalesce_key,
        m.expires_at <= now() AS has_expired,
        CASE WHEN head.newest_id > m.id THEN head.newest_id END AS newest_id,
        CASE
            WHEN m.coalesces_pending THEN pgoutbox.newer_pending(m.topic, m.coalesce_key, m.queue, m.id)
        END AS newer_id
    FROM pgoutbox.message_live AS m
    LEFT JOIN pgoutbox.coalesce AS head ON head.topic = m.topic AND head.coalesce_key = m.coalesce_key
    WHERE m.queue = %(queue)s::text
        AND m.attempt_count = 0
        AND m.ordering_key IS NULL
        AND m.available_at <= now()
        AND (m.available_at, m.id) > (coalesce(%(fresh_floor)s::timestamptz, '-infinity'), %(fresh_floor_id)s::bigint)
        AND m.topic = ANY (%(topics)s::text[])
        -- One in flight for each key: what is not superseded waits until its predecessor is done with.
        AND (
            m.coalesce_key IS NULL
            OR head.newest_id > m.id
            OR (
                NOT EXISTS (
                    SELECT
                    FROM pgoutbox.message_live AS sibling
                    WHERE sibling.topic = m.topic
                        AND sibling.coalesce_key = m.coalesce_key
                        AND sibling.state = 'sending'
                        AND sibling.id <> m.id
                )
                AND CASE
                    WHEN m.coalesces_pending AND head.newest_id IS NOT NULL
                        THEN pgoutbox.has_strict_due(m.topic, m.coalesce_key, m.queue)
                END IS NOT TRUE
            )
            OR CASE
                WHEN m.coalesces_pending THEN pgoutbox.newer_pending(m.topic, m.coalesce_key, m.queue, m.id)
            END IS NOT NULL
        )
        AND NOT EXISTS (
            SELECT
            FROM pgoutbox.queue AS q
            WHERE q.name = %(queue)s::text
                AND (
                    num_nonnulls(q.rate_count, q.max_in_flight) > 0
                    OR (q.paused_at IS NOT NULL AND (q.resume_at > now()) IS NOT FALSE)
                )
        )
    ORDER BY m.available_at, m.id
    LIMIT %(total)s::bigint
    FOR UPDATE OF m SKIP LOCKED
)"""
_BEGIN_FRESH: Final[LiteralString] = """, in_order_of_keys AS MATERIALIZED (
    -- The update below enters keys into the index of what is in flight: two claims enter them in one order.
    SELECT
        c.id,
        coalesce(c.newest_id, c.newer_id) AS superseded_by,
        CASE
            WHEN c.newest_id IS NOT NULL OR c.newer_id IS NOT NULL OR c.has_expired THEN 'skipped'
            ELSE 'sending'
        END AS state
    FROM candidate AS c
    WHERE c.newer_id IS NULL OR c.newest_id IS NOT NULL OR c.newer_id = ANY (ARRAY(SELECT n.id FROM newer AS n))
    ORDER BY c.coalesce_key COLLATE "C", CASE WHEN c.coalesce_key IS NOT NULL THEN c.topic END COLLATE "C"
)
UPDATE pgoutbox.message AS m
SET state = d.state,
    attempt_count = CASE WHEN d.state = 'sending' THEN 1 ELSE 0 END,
    claimed_at = CASE WHEN d.state = 'sending' THEN now() END,
    worker = CASE WHEN d.state = 'sending' THEN %(worker)s::text END,
    lease_expires_at = CASE WHEN d.state = 'sending' THEN now() + make_interval(secs => %(lease_seconds)s::float8) END,
    finished_at = CASE WHEN d.state = 'skipped' THEN now() END,
    skip_reason = CASE
        WHEN d.state = 'skipped' THEN coalesce('superseded by ' || d.superseded_by, 'expired')
    END,
    superseded_by = d.superseded_by
FROM in_order_of_keys AS d
WHERE m.id = d.id AND m.state = 'pending' AND m.attempt_count = 0
RETURNING
"""
CLAIM_FRESH: Final[LiteralString] = _FRESH + _NEWER_LOCKED + _BEGIN_FRESH + _COLUMNS

# The same two without the messages that a worker has set aside, and which messages the first would claim.
_TOPICS: Final[LiteralString] = "AND m.topic = ANY (%(topics)s::text[])"
_NOT_ASIDE: Final[LiteralString] = (
    _TOPICS
    + """
        AND m.id <> ALL (%(set_aside)s::bigint[])"""
)
CLAIM_WITHOUT: Final[LiteralString] = CLAIM.replace(_TOPICS, _NOT_ASIDE)
CLAIM_FRESH_WITHOUT: Final[LiteralString] = CLAIM_FRESH.replace(_TOPICS, _NOT_ASIDE)
CANDIDATES: Final[LiteralString] = (
    (_PERMIT + _FRESH_LANE + _OTHER_LANES).replace(_TOPICS, _NOT_ASIDE)
    + """
SELECT c.id
FROM candidate AS c"""
)

# Ends attempts of other queues whose lease has lapsed and whose message is superseded. Nobody may serve their queue any
# more, and a newer message of their key cannot be claimed before they end. `message_live_in_flight` has only attempts
# in flight.
_ELSEWHERE: Final[LiteralString] = """
WITH permit AS MATERIALIZED (
    SELECT 0 AS count, false AS is_limited
), candidate AS MATERIALIZED (
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
        m.lease_expires_at AS due_at,
        newer.id AS newer_id
    FROM pgoutbox.message_live AS m
    CROSS JOIN LATERAL (
        SELECT max(pgoutbox.newer_pending(m.topic, m.coalesce_key, q.name, m.id)) AS id
        FROM unnest(%(queues)s::text[]) AS q(name)
        WHERE m.coalesces_pending
    ) AS newer
    WHERE m.state = 'sending'
        AND m.coalesce_key IS NOT NULL
        AND m.topic = ANY (%(topics)s::text[])
        AND m.queue <> ALL (%(queues)s::text[])
        AND m.lease_expires_at <= now()
        AND now() <= coalesce(%(clock_limit)s::timestamptz, 'infinity')
        AND m.worker <> %(worker)s::text
        AND (
            newer.id IS NOT NULL
            OR EXISTS (
                SELECT
                FROM pgoutbox.coalesce AS head
                WHERE head.topic = m.topic AND head.coalesce_key = m.coalesce_key AND head.newest_id > m.id
            )
        )
    ORDER BY m.lease_expires_at, m.id
    LIMIT %(total)s::bigint
    FOR UPDATE OF m SKIP LOCKED
)"""
END_SUPERSEDED_ELSEWHERE: Final[LiteralString] = _ELSEWHERE + _JUDGE

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
        WHERE first.available_at <= now()
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
    SELECT m.id, m.topic, m.available_at
    FROM pgoutbox.message_live AS m
    WHERE m.queue = %(queue)s::text AND m.ordering_key = v.ordering_key
    ORDER BY m.id
    LIMIT 1
) AS first
"""

# Asks once more what may have changed since they were found; of a message that another claim had meanwhile, state and
# due time are asked of its newest version. Whatever two claims see, only one message of a key can be in flight:
# message_live_ordered_in_flight.
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
        m.available_at AS due_at,
        NULL::bigint AS newer_id
    FROM unnest(%(ids)s::bigint[]) AS found(id)
    JOIN pgoutbox.message_live AS m ON m.id = found.id
    WHERE m.state = 'pending'
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
        AND NOT EXISTS (
            -- A message that was cancelled and redriven since may have failed meanwhile.
            SELECT
            FROM pgoutbox.message_failed AS f
            WHERE f.queue = m.queue AND f.ordering_key = m.ordering_key AND f.on_failed = 'halt' AND f.id < m.id
        )
    ORDER BY m.available_at, m.id
    LIMIT (SELECT p.count FROM permit AS p)
    FOR UPDATE OF m SKIP LOCKED
)"""
CLAIM_ORDERED: Final[LiteralString] = _PERMIT + _ORDERED_LANE + _JUDGE

# When the first message of these queues falls due that was not due `since_seconds` ago, in seconds from now; null if
# there is none. What fell due between the snapshots of the last claim and of this statement is in neither of them. In a
# queue with limits messages may be due for long: they are looked at again with the next permit, or soon when there is
# one, because others have the messages or the limit has moved since the claim. Also the queues with ordering keys,
# and the time.
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
    ),
    now()
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

CONTENTS: Final[LiteralString] = """
SELECT c.id, c.body::text
FROM pgoutbox.content AS c
WHERE c.id = ANY (%(ids)s::bigint[])
"""
