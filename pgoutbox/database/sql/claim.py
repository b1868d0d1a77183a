"""The claims of messages, and the query for the next due time.

A worker reads a queue lane by lane: messages never attempted, retries, the first message of each ordering key, and
attempts whose lease has lapsed. Each lane has its own statement, composed of the parts below. Every claim checks state
and attempt count again in its UPDATE.
"""

from typing import Final, LiteralString

# Due messages without an ordering key. `now()` can be an index condition; clock_timestamp(), which is volatile, cannot.
#
# Two messages of one key are never in flight: a message waits for its predecessor unless it is superseded. A message of
# the rule `pending` also waits for a strict one of its key: the unique index would refuse one of them. LIMIT makes
# PostgreSQL look up the predecessor by its key; otherwise it may read all attempts in flight.
_DUE: Final[LiteralString] = """due AS MATERIALIZED (
    SELECT m.ctid AS place, m.id, m.topic, m.coalesce_key, m.coalesces_pending, m.attempt_count, m.expires_at,
        head.newest_id
    FROM pgoutbox.message_live AS m
    LEFT JOIN pgoutbox.coalesce AS head
        ON head.topic = m.topic AND head.coalesce_key = m.coalesce_key AND m.coalesces_pending IS NOT TRUE
    LEFT JOIN LATERAL (
        SELECT s.id FROM pgoutbox.message_live AS s
        WHERE s.topic = m.topic AND s.coalesce_key = m.coalesce_key AND s.state = 'sending' LIMIT 1
    ) AS sibling ON true
    WHERE m.queue = %(queue)s::text AND m.ordering_key IS NULL AND m.available_at <= now()
        AND m.topic = ANY (%(topics)s::text[]) AND m.id <> ALL (%(set_aside)s::bigint[])
        AND (
            m.coalesce_key IS NULL
            OR head.newest_id > m.id
            OR (m.coalesces_pending IS TRUE
                AND pgoutbox.newer_pending(m.topic, m.coalesce_key, m.queue, m.id) IS NOT NULL)
            OR (sibling.id IS NULL
                AND (m.coalesces_pending IS NOT TRUE OR NOT pgoutbox.has_strict_due(m.topic, m.coalesce_key, m.queue)))
        )"""

# The lanes, each from its floor on. Each has its own index, so that a backlog of retries never delays fresh
# messages. New messages are the fresh ones that were enqueued since the worker has seen all messages up to an id.
_FRESH: Final[LiteralString] = """
        AND m.attempt_count = 0
        AND (m.available_at, m.id) > (coalesce(%(floor_at)s::timestamptz, '-infinity'), %(floor_id)s::bigint)"""
_RETRIES: Final[LiteralString] = """
        AND m.attempt_count > 0 AND m.state = 'pending'
        AND (m.available_at, m.id) > (coalesce(%(floor_at)s::timestamptz, '-infinity'), %(floor_id)s::bigint)"""
_NEW: Final[LiteralString] = """
        AND m.attempt_count = 0
        AND m.id > %(floor_id)s::bigint"""

# Claims without permits exclude queues that are paused or have limits. Claims by permits lock the row of such a queue,
# so that they run one after the other.
_WITHOUT_PERMITS: Final[LiteralString] = """
        AND NOT pgoutbox.is_limited(%(queue)s::text)"""
_BY_DUE_TIME: Final[LiteralString] = """
    ORDER BY m.available_at, m.id
    LIMIT %(total)s::bigint
    FOR UPDATE OF m SKIP LOCKED
)"""
_BY_ID: Final[LiteralString] = """
    ORDER BY m.id
    LIMIT %(total)s::bigint
    FOR UPDATE OF m SKIP LOCKED
)"""
_BY_PERMITS: Final[LiteralString] = """
    ORDER BY m.available_at, m.id
    LIMIT pgoutbox.permits(%(queue)s::text, %(total)s::bigint)
    FOR UPDATE OF m SKIP LOCKED
)"""

# An attempt begins, or the message ends here because it is superseded or has expired. The update enters keys into the
# unique index of attempts in flight. All claims do so in one order, or two of them could deadlock.
_JUDGED: Final[LiteralString] = """, judged AS MATERIALIZED (
    SELECT d.place, d.id, d.attempt_count, newer.id AS superseded_by,
        CASE WHEN newer.id IS NOT NULL OR d.expires_at <= now() THEN 'skipped' ELSE 'sending' END AS state
    FROM due AS d
    CROSS JOIN LATERAL (
        SELECT CASE
            WHEN d.newest_id > d.id THEN d.newest_id
            WHEN d.coalesces_pending THEN pgoutbox.lock_newer_pending(d.topic, d.coalesce_key, %(queue)s::text, d.id)
        END
    ) AS newer(id)
    WHERE newer.id IS DISTINCT FROM 0
    ORDER BY d.coalesce_key, CASE WHEN d.coalesce_key IS NOT NULL THEN d.topic END
)"""

# A crash between the claim and the delivery uses up the tokens.
_SPENT: Final[LiteralString] = """, spent AS (
    UPDATE pgoutbox.queue AS q
    SET tokens = greatest(0, pgoutbox.tokens_of(q) - begun.count), tokens_at = clock_timestamp()
    FROM (SELECT count(*) AS count FROM judged AS j WHERE j.state = 'sending') AS begun
    WHERE q.name = %(queue)s::text AND q.rate_count IS NOT NULL AND begun.count > 0
)"""

# A row is updated at the place where it was locked. By its id alone PostgreSQL may plan to scan the whole primary key,
# dead entries included, because statistics may describe an empty table. A row that was updated since this statement
# began is left to the next claim.
_BEGIN: Final[LiteralString] = """
UPDATE pgoutbox.message AS m
SET state = j.state,
    attempt_count = m.attempt_count + CASE WHEN j.state = 'sending' THEN 1 ELSE 0 END,
    claimed_at = CASE WHEN j.state = 'sending' THEN now() ELSE m.claimed_at END,
    worker = CASE WHEN j.state = 'sending' THEN %(worker)s::text ELSE m.worker END,
    lease_expires_at = CASE WHEN j.state = 'sending' THEN now() + make_interval(secs => %(lease_seconds)s::float8) END,
    finished_at = CASE WHEN j.state = 'skipped' THEN now() END,
    skip_reason = CASE WHEN j.state = 'skipped' THEN coalesce('superseded by ' || j.superseded_by, 'expired') END,
    superseded_by = j.superseded_by
FROM judged AS j
WHERE m.ctid = j.place AND m.id = j.id AND m.state = 'pending' AND m.attempt_count = j.attempt_count"""

_ROWS: Final[LiteralString] = """
RETURNING m.id, m.topic, m.destination,
    coalesce(m.payload, (SELECT l.body FROM pgoutbox.large_payload AS l WHERE l.message_id = m.id))::text
        AS payload_json,
    m.headers::text AS headers_json, m.attempt_count, m.max_attempts, m.attempt_budget, m.created_at, m.available_at,
    m.coalesce_key, m.ordering_key, m.content_id, m.claimed_at, m.state,
    extract(epoch FROM CASE WHEN isfinite(m.expires_at) THEN m.expires_at - now() END)::float8 AS expires_in_seconds"""
_ENDED_ROWS: Final[LiteralString] = (
    _ROWS
    + """,
    m.queue"""
)

_FOUND_DUE: Final[LiteralString] = """
SELECT d.id
FROM due AS d"""
_FOUND_LAPSED: Final[LiteralString] = """
SELECT j.id
FROM judged AS j"""

# Claims up to `total` due messages of one lane, those with the earliest due time first.
_DUE_FRESH: Final[LiteralString] = "WITH " + _DUE + _FRESH + _WITHOUT_PERMITS + _BY_DUE_TIME
_DUE_NEW: Final[LiteralString] = "WITH " + _DUE + _NEW + _WITHOUT_PERMITS + _BY_ID
_DUE_RETRIES: Final[LiteralString] = "WITH " + _DUE + _RETRIES + _WITHOUT_PERMITS + _BY_DUE_TIME
_PERMITTED_FRESH: Final[LiteralString] = "WITH " + _DUE + _FRESH + _BY_PERMITS
_PERMITTED_RETRIES: Final[LiteralString] = "WITH " + _DUE + _RETRIES + _BY_PERMITS

CLAIM_FRESH: Final[LiteralString] = _DUE_FRESH + _JUDGED + _BEGIN + _ROWS
CLAIM_NEW: Final[LiteralString] = _DUE_NEW + _JUDGED + _BEGIN + _ROWS
CLAIM_RETRIES: Final[LiteralString] = _DUE_RETRIES + _JUDGED + _BEGIN + _ROWS
CLAIM_FRESH_BY_PERMITS: Final[LiteralString] = _PERMITTED_FRESH + _JUDGED + _SPENT + _BEGIN + _ROWS
CLAIM_RETRIES_BY_PERMITS: Final[LiteralString] = _PERMITTED_RETRIES + _JUDGED + _SPENT + _BEGIN + _ROWS

# Before a claim from a backlog, in its transaction. A separate statement, because the claim's snapshot must be later.
TAKE_TURN: Final[LiteralString] = "SELECT pgoutbox.take_turn(%(queue)s::text)"

# The claimed messages that are superseded: another worker may have claimed, delivered and finished a newer one since
# the claim's snapshot. The claim has the keys now, so that no newer message can begin.
OVERTAKEN: Final[LiteralString] = """
SELECT m.id
FROM pgoutbox.message_live AS m
JOIN pgoutbox.coalesce AS head ON head.topic = m.topic AND head.coalesce_key = m.coalesce_key
WHERE m.id = ANY (%(ids)s::bigint[]) AND m.coalesces_pending IS NOT TRUE AND head.newest_id > m.id
"""

# The messages that these statements would claim.
FIND_FRESH: Final[LiteralString] = _PERMITTED_FRESH + _FOUND_DUE
FIND_NEW: Final[LiteralString] = _DUE_NEW + _FOUND_DUE
FIND_RETRIES: Final[LiteralString] = _PERMITTED_RETRIES + _FOUND_DUE

# Attempts whose lease has lapsed. `held` lists the attempts that this worker still holds: after a suspension or an
# outage it renews their leases. Beyond `clock_limit` no lease counts as lapsed: after the server's clock has stepped
# forward, live workers renew their leases soon.
_LAPSED: Final[LiteralString] = """judged AS MATERIALIZED (
    SELECT m.ctid AS place, m.id, m.attempt_count, m.worker, m.claimed_at, newer.id AS newer_id,
        coalesce(ending.state, 'sending') AS state
    FROM pgoutbox.message_live AS m
    LEFT JOIN pgoutbox.coalesce AS head
        ON head.topic = m.topic AND head.coalesce_key = m.coalesce_key AND m.coalesces_pending IS NOT TRUE
    CROSS JOIN LATERAL (
        SELECT CASE
            WHEN head.newest_id > m.id THEN head.newest_id
            WHEN m.coalesces_pending THEN (
                SELECT max(pgoutbox.newer_pending(m.topic, m.coalesce_key, served.name, m.id))
                FROM unnest(%(queues)s::text[]) AS served(name)
            )
        END
    ) AS newer(id)
    CROSS JOIN LATERAL (
        SELECT CASE
            WHEN m.cancel_requested_at IS NOT NULL THEN 'cancelled'
            WHEN newer.id IS NOT NULL OR m.expires_at <= now() THEN 'skipped'
            WHEN m.attempt_count >= m.max_attempts OR m.topic = ANY (%(hold_topics)s::text[]) THEN 'failed'
        END
    ) AS ending(state)
    WHERE m.state = 'sending'
        AND m.lease_expires_at <= now()
        AND now() <= coalesce(%(clock_limit)s::timestamptz, 'infinity')
        AND greatest(m.lease_expires_at, pgoutbox.renewed_until(m.id, m.attempt_count, m.worker)) <= now()
        AND m.topic = ANY (%(topics)s::text[])
        AND m.id <> ALL (%(set_aside)s::bigint[])
        AND (m.worker <> %(worker)s::text OR m.id <> ALL (%(held)s::bigint[]))"""

_IN_QUEUE: Final[LiteralString] = """
        AND m.queue = %(queue)s::text"""

_LOST: Final[LiteralString] = """, lost AS (
    INSERT INTO pgoutbox.attempt (message_id, attempt_count, outcome, worker, started_at, ended_at, error)
    SELECT j.id, j.attempt_count, 'lost', j.worker, j.claimed_at, now(), 'lease expired, outcome unknown'
    FROM judged AS j
    ON CONFLICT DO NOTHING
)"""

# Lapsed attempts whose message is not tried again end here. This statement is separate from the next one because these
# attempts do not wait for a limit: a newer message of their key may wait for them.
_ENDING: Final[LiteralString] = """
        AND ending.state IS NOT NULL
    ORDER BY m.lease_expires_at, m.id
    LIMIT %(total)s::bigint
    FOR UPDATE OF m SKIP LOCKED
)"""
_END: Final[LiteralString] = """
UPDATE pgoutbox.message AS m
SET state = j.state,
    lease_expires_at = NULL,
    finished_at = now(),
    skip_reason = CASE WHEN j.state = 'skipped' THEN coalesce('superseded by ' || j.newer_id, 'expired') END,
    superseded_by = CASE WHEN j.state = 'skipped' THEN j.newer_id END,
    last_error = 'attempt ' || j.attempt_count || ': lease of ' || j.worker || ' expired, outcome unknown'
FROM judged AS j
WHERE m.ctid = j.place AND m.id = j.id AND m.state = 'sending' AND m.attempt_count = j.attempt_count"""
_DUE_TO_END: Final[LiteralString] = "WITH " + _LAPSED + _IN_QUEUE + _ENDING
END_LAPSED: Final[LiteralString] = _DUE_TO_END + _LOST + _END + _ENDED_ROWS
FIND_ENDING: Final[LiteralString] = _DUE_TO_END + _FOUND_LAPSED

# The other lapsed attempts are made again. They are suspects: one of them may have crashed its process. So at most
# `total` are claimed. A total of 1 takes the suspect that has waited longest. A greater total takes only suspects that
# can afford another loss: those with more than half of their granted attempts left.
_SUSPECTS: Final[LiteralString] = """
        AND ending.state IS NULL
        AND (%(total)s::bigint = 1 OR m.max_attempts - m.attempt_count > m.attempt_budget / 2)
    ORDER BY m.lease_expires_at, m.id
    LIMIT pgoutbox.permits(%(queue)s::text, %(total)s::bigint)
    FOR UPDATE OF m SKIP LOCKED
)"""
_BEGIN_AGAIN: Final[LiteralString] = """
UPDATE pgoutbox.message AS m
SET attempt_count = m.attempt_count + 1,
    claimed_at = now(),
    worker = %(worker)s::text,
    lease_expires_at = now() + make_interval(secs => %(lease_seconds)s::float8),
    last_error = 'attempt ' || j.attempt_count || ': lease of ' || j.worker || ' expired, outcome unknown'
FROM judged AS j
WHERE m.ctid = j.place AND m.id = j.id AND m.state = 'sending' AND m.attempt_count = j.attempt_count"""
_DUE_AGAIN: Final[LiteralString] = "WITH " + _LAPSED + _IN_QUEUE + _SUSPECTS
CLAIM_LAPSED: Final[LiteralString] = _DUE_AGAIN + _SPENT + _LOST + _BEGIN_AGAIN + _ROWS
FIND_LAPSED: Final[LiteralString] = _DUE_AGAIN + _FOUND_LAPSED

# Ends superseded lapsed attempts of other queues: a newer message of their key cannot be claimed before they end, and
# their own queue may no longer have a worker. The index message_live_in_flight contains only keys in flight.
_ELSEWHERE: Final[LiteralString] = """
        AND m.coalesce_key IS NOT NULL
        AND m.queue <> ALL (%(queues)s::text[])
        AND newer.id IS NOT NULL"""
END_SUPERSEDED_ELSEWHERE: Final[LiteralString] = "WITH " + _LAPSED + _ELSEWHERE + _ENDING + _LOST + _END + _ENDED_ROWS

# Messages with an ordering key. Only the first message of each key is read, whatever the number of messages behind it.
# It can be claimed if it is due, no message of its key is in flight, and no failed message before it halts the key.
_FIRSTS: Final[LiteralString] = """
CROSS JOIN LATERAL (
    SELECT m.id, m.topic, m.available_at
    FROM pgoutbox.message_live AS m
    WHERE m.queue = %(queue)s::text AND m.ordering_key = v.ordering_key
    ORDER BY m.id
    LIMIT 1
) AS first"""
_CLAIMABLE: Final[LiteralString] = """
    first.available_at <= now()
    AND first.topic = ANY (%(topics)s::text[])
    AND NOT EXISTS (
        SELECT FROM pgoutbox.message_live AS sibling
        WHERE sibling.queue = %(queue)s::text AND sibling.ordering_key = v.ordering_key AND sibling.state = 'sending'
    )
    AND NOT EXISTS (
        SELECT FROM pgoutbox.message_failed AS f
        WHERE f.queue = %(queue)s::text AND f.ordering_key = v.ordering_key AND f.on_failed = 'halt' AND f.id < first.id
    )"""

# A page of a round over all keys: from `after_key` on, at most `key_limit` keys. One row: the claimable messages, the
# last key of the page, and its number of keys.
_PAGE: Final[LiteralString] = """
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
SELECT array_agg(first.id) FILTER (WHERE"""
_PAGE_OF_KEYS: Final[LiteralString] = """
), max(v.ordering_key), count(*)
FROM visited AS v"""
FIND_ORDERED: Final[LiteralString] = _PAGE + _CLAIMABLE + _PAGE_OF_KEYS + _FIRSTS

# The same for the keys of up to `key_limit` new messages, so that they do not wait until a round over many keys reaches
# their key. The rounds find all other messages.
_NEW_KEYS: Final[LiteralString] = """
WITH new AS MATERIALIZED (
    SELECT m.ordering_key
    FROM pgoutbox.message_live AS m
    WHERE m.queue = %(queue)s::text AND m.ordering_key IS NOT NULL AND m.id > %(floor_id)s::bigint
    ORDER BY m.id
    LIMIT %(key_limit)s::integer
)
SELECT first.id
FROM (SELECT DISTINCT n.ordering_key FROM new AS n) AS v"""
_WHERE: Final[LiteralString] = """
WHERE"""
FIND_NEW_ORDERED: Final[LiteralString] = _NEW_KEYS + _FIRSTS + _WHERE + _CLAIMABLE

# Claims the messages that one of these found, and checks again the conditions that may have changed since then. If
# another worker claimed a message meanwhile, PostgreSQL checks state and due time on the newest version. The index
# message_live_ordered_in_flight guards "one message of a key in flight".
_DUE_ORDERED: Final[LiteralString] = """due AS MATERIALIZED (
    SELECT m.ctid AS place, m.id, m.topic, m.coalesce_key, m.coalesces_pending, m.attempt_count, m.expires_at,
        NULL::bigint AS newest_id
    FROM unnest(%(ids)s::bigint[]) AS found(id)
    JOIN pgoutbox.message_live AS m ON m.id = found.id
    WHERE m.state = 'pending'
        AND m.available_at <= now()
        AND NOT EXISTS (
            SELECT FROM pgoutbox.message_live AS earlier
            WHERE earlier.queue = m.queue AND earlier.ordering_key = m.ordering_key AND earlier.id < m.id
        )
        AND NOT EXISTS (
            SELECT FROM pgoutbox.message_live AS other
            WHERE other.queue = m.queue AND other.ordering_key = m.ordering_key AND other.state = 'sending'
        )
        AND NOT EXISTS (
            -- An operator may have redriven a cancelled message that has failed since.
            SELECT FROM pgoutbox.message_failed AS f
            WHERE f.queue = m.queue AND f.ordering_key = m.ordering_key AND f.on_failed = 'halt' AND f.id < m.id
        )"""
CLAIM_ORDERED: Final[LiteralString] = "WITH " + _DUE_ORDERED + _BY_PERMITS + _JUDGED + _SPENT + _BEGIN + _ROWS

# For each queue: whether it has messages with an ordering key; the seconds until the next attempt may begin, null for a
# queue that is not paused and has no limits; and the seconds until the next message falls due, null if there is none,
# first for fresh and ordered messages, then for retries and leases. Messages that were already due when the worker last
# looked do not count. In a queue with limits they count, because the worker may have had no permit for them. Due fresh
# messages beyond `floor_id` do not count either: the worker claims them as new ones.
#
# Then the time, the server, the oldest open transaction, the next transaction id and the last message id. The xmax of a
# snapshot is not the next transaction id, because it counts completed transactions only; age() counts from the next
# one, modulo 2^32. Every transaction that enqueues has its id before it draws the ids of its messages. So all messages
# up to the last message id are visible to any later snapshot in which no transaction before that next one is open.
NEXT_DUE: Final[LiteralString] = """
SELECT
    asked.name,
    EXISTS (SELECT FROM pgoutbox.message_live AS o WHERE o.queue = asked.name AND o.ordering_key IS NOT NULL),
    CASE WHEN asked.permit_at = 'infinity' THEN 'infinity' ELSE extract(epoch FROM asked.permit_at - now())::float8 END,
    extract(epoch FROM due.first_at - now())::float8,
    extract(epoch FROM due.other_at - now())::float8,
    now(),
    pg_postmaster_start_time(),
    asked.xmin,
    asked.xmin + ((3 + age('3'::xid) - asked.xmin) & 4294967295),
    coalesce(pg_sequence_last_value('pgoutbox.message_id_seq'), 0)
FROM (
    SELECT
        served.name,
        CASE WHEN q.name IS NOT NULL THEN coalesce(pgoutbox.next_permit_at(q.name), now()) END AS permit_at,
        now() - make_interval(secs => CASE WHEN q.name IS NULL THEN %(since_seconds)s::float8 ELSE 1e9 END) AS since,
        now() - make_interval(secs => CASE WHEN q.name IS NULL THEN %(others_since_seconds)s::float8 ELSE 1e9 END)
            AS others_since,
        pg_snapshot_xmin(pg_current_snapshot())::text::bigint AS xmin
    FROM unnest(%(queues)s::text[]) AS served(name)
    LEFT JOIN pgoutbox.queue AS q
        ON q.name = served.name AND num_nonnulls(q.paused_at, q.rate_count, q.max_in_flight) > 0
    OFFSET 0
) AS asked
CROSS JOIN LATERAL (
    SELECT
        least(
            (
                SELECT min(m.available_at)
                FROM pgoutbox.message_live AS m
                WHERE m.queue = asked.name AND m.attempt_count = 0 AND m.ordering_key IS NULL
                    AND m.available_at > asked.since
                    AND (m.id <= %(floor_id)s::bigint OR m.available_at > now() OR asked.permit_at IS NOT NULL)
            ),
            (
                -- This includes messages that wait for their turn: at worst one look finds nothing.
                SELECT min(m.available_at)
                FROM pgoutbox.message_live AS m
                WHERE m.queue = asked.name AND m.state = 'pending' AND m.ordering_key IS NOT NULL
                    AND m.available_at > asked.since
            )
        ) AS first_at,
        least(
            (
                SELECT min(m.available_at)
                FROM pgoutbox.message_live AS m
                WHERE m.queue = asked.name AND m.state = 'pending' AND m.attempt_count > 0 AND m.ordering_key IS NULL
                    AND m.available_at > asked.others_since
            ),
            (
                SELECT min(m.lease_expires_at)
                FROM pgoutbox.message_live AS m
                WHERE m.queue = asked.name AND m.state = 'sending' AND m.lease_expires_at > asked.others_since
            )
        ) AS other_at
) AS due
"""

CONTENTS: Final[LiteralString] = """
SELECT c.id, c.body::text
FROM pgoutbox.content AS c
WHERE c.id = ANY (%(ids)s::bigint[])
"""
