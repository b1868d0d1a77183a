"""The ends of attempts, and the renewal of their leases.

Every statement is fenced by the state, the attempt count and the worker. The count alone is not enough: a failover or a
crash that loses commits gives the same attempt number out a second time, to another worker.
"""

from typing import Final, LiteralString

# The common case, for attempts of one number; a separate statement because it is the hot path. If a caller's
# transaction has locked a row to cancel it, the statement fails after a short wait: `FINISH_IF_HELD` passes over such a
# row.
FINISH_SENT_IF_HELD: Final[LiteralString] = """
UPDATE pgoutbox.message AS m
SET state = 'sent',
    finished_at = now(),
    lease_expires_at = NULL
WHERE m.id = ANY (%(ids)s::bigint[])
    AND m.state = 'sending'
    AND m.attempt_count = %(attempt_count)s::integer
    AND m.worker = %(worker)s::text
    -- This is set once, before the first row, and until the end of this transaction.
    AND (SELECT set_config('lock_timeout', '20ms', true)) IS NOT NULL
RETURNING m.id
"""

# The same with a rule that deletes sent messages at once: the row is deleted instead of becoming `sent`, with the
# history of its attempts. The function reads the rule once for each topic, so that a removed rule has no effect at
# once, and a worker needs no privilege to delete. The dedupe key stays as long as its rule keeps it: the message was
# sent, and its repetition is a duplicate.
FINISH_SENT_AND_FORGET_IF_HELD: Final[LiteralString] = """
WITH held AS MATERIALIZED (
    SELECT m.id, m.attempt_count
    FROM unnest(%(ids)s::bigint[], %(attempt_counts)s::integer[]) AS o(id, attempt_count)
    JOIN pgoutbox.message_live AS m ON m.id = o.id
    WHERE m.state = 'sending' AND m.attempt_count = o.attempt_count AND m.worker = %(worker)s::text
    FOR UPDATE OF m SKIP LOCKED
), forgotten AS MATERIALIZED (
    SELECT f.id
    FROM pgoutbox.forget_sent(
        ARRAY(SELECT h.id FROM held AS h), ARRAY(SELECT h.attempt_count FROM held AS h), %(worker)s::text
    ) AS f(id)
), kept AS (
    UPDATE pgoutbox.message AS m
    SET state = 'sent',
        finished_at = now(),
        lease_expires_at = NULL
    FROM held AS h
    WHERE m.id = h.id
        AND m.state = 'sending'
        AND m.attempt_count = h.attempt_count
        AND h.id <> ALL (ARRAY(SELECT f.id FROM forgotten AS f))
    RETURNING m.id, m.state
)
SELECT k.id, k.state FROM kept AS k
UNION ALL
SELECT f.id, 'sent' FROM forgotten AS f
"""

# The topics of rules that delete sent messages at once. Their number is the number of rules.
FORGOTTEN_TOPICS: Final[LiteralString] = """
SELECT r.topic
FROM pgoutbox.retention AS r
WHERE r.state = 'sent' AND r.keep = interval '0'
"""

# Every outcome. The new state depends on the attempt's verdict (sent, retry, snoozed, released, failed, skipped) and on
# changes of the message meanwhile. A row that a caller's transaction has locked is left out and tried again: one row
# never delays a batch. A message that would become pending again ends instead if it was cancelled, superseded or has no
# attempt left. By the rule `pending` it is superseded by a message that is due no later, and that cannot begin before
# this attempt has ended. Snooze and release do not use up an attempt: they raise the budget, because the count never
# goes down.
FINISH_IF_HELD: Final[LiteralString] = """
WITH held AS MATERIALIZED (
    SELECT
        o.id, o.attempt_count, o.outcome, o.reason, o.reason_code, o.breaker_key, o.delay_seconds,
        newer.id AS newer_id,
        CASE
            WHEN o.outcome IN ('sent', 'failed', 'skipped') THEN o.outcome
            WHEN m.cancel_requested_at IS NOT NULL THEN 'cancelled'
            WHEN newer.id IS NOT NULL THEN 'skipped'
            WHEN o.outcome = 'retry' AND o.attempt_count >= m.max_attempts THEN 'failed'
            ELSE 'pending'
        END AS state
    FROM unnest(
        %(ids)s::bigint[], %(attempt_counts)s::integer[], %(outcomes)s::text[], %(reasons)s::text[],
        %(reason_codes)s::text[], %(breaker_keys)s::text[], %(delays)s::float8[]
    ) AS o(id, attempt_count, outcome, reason, reason_code, breaker_key, delay_seconds)
    JOIN pgoutbox.message_live AS m ON m.id = o.id
    LEFT JOIN pgoutbox.coalesce AS head
        ON head.topic = m.topic AND head.coalesce_key = m.coalesce_key AND m.coalesces_pending IS NOT TRUE
    CROSS JOIN LATERAL (
        SELECT CASE
            WHEN head.newest_id > m.id THEN head.newest_id
            WHEN m.coalesces_pending THEN pgoutbox.newer_pending(
                m.topic, m.coalesce_key, m.queue, m.id, now() + make_interval(secs => coalesce(o.delay_seconds, 0))
            )
        END AS id
    ) AS newer
    WHERE m.state = 'sending' AND m.attempt_count = o.attempt_count AND m.worker = %(worker)s::text
    FOR UPDATE OF m SKIP LOCKED
), finished AS (
    UPDATE pgoutbox.message AS m
    SET state = h.state,
        available_at = CASE
            WHEN h.state = 'pending' AND h.outcome <> 'released' THEN now() + make_interval(secs => h.delay_seconds)
            ELSE m.available_at
        END,
        lease_expires_at = NULL,
        finished_at = CASE WHEN h.state <> 'pending' THEN now() END,
        max_attempts = m.max_attempts + CASE WHEN h.outcome IN ('snoozed', 'released') THEN 1 ELSE 0 END,
        skip_reason = CASE
            WHEN h.state <> 'skipped' THEN NULL
            WHEN h.outcome = 'skipped' THEN h.reason
            ELSE 'superseded by ' || h.newer_id
        END,
        superseded_by = CASE WHEN h.state = 'skipped' AND h.outcome <> 'skipped' THEN h.newer_id END,
        last_error = CASE
            WHEN h.outcome IN ('retry', 'failed') THEN h.reason
            WHEN h.outcome = 'snoozed' THEN coalesce(h.reason, m.last_error)
            ELSE m.last_error
        END
    FROM held AS h
    WHERE m.id = h.id AND m.state = 'sending' AND m.attempt_count = h.attempt_count
    RETURNING m.id, m.state, m.attempt_count, m.worker, m.claimed_at,
        CASE WHEN h.state = 'pending' THEN h.outcome ELSE h.state END AS outcome,
        h.reason, h.reason_code, h.breaker_key
), history AS (
    INSERT INTO pgoutbox.attempt
        (message_id, attempt_count, outcome, worker, started_at, ended_at, error, reason_code, breaker_key)
    SELECT f.id, f.attempt_count, f.outcome, f.worker, f.claimed_at, now(), f.reason, f.reason_code,
        f.breaker_key
    FROM finished AS f
    WHERE f.state <> 'sent'
    ON CONFLICT DO NOTHING
)
SELECT f.id, f.state FROM finished AS f
"""

# The states of the messages of these attempts, unless another attempt has begun. A finish reads them after it did not
# write all of its rows. `sending` means that the row was locked; any other state means that an earlier try of the same
# finish was committed and its answer lost.
STANDING: Final[LiteralString] = """
SELECT m.id, m.state
FROM unnest(%(ids)s::bigint[], %(attempt_counts)s::integer[]) AS o(id, attempt_count)
JOIN pgoutbox.message AS m ON m.id = o.id
WHERE m.attempt_count = o.attempt_count AND m.worker = %(worker)s::text
"""

# Attempts of this worker whose claim was not answered. Such a row has the worker's name, and its claim time lies
# between those of the answered claims before and after it.
UNANSWERED_ATTEMPTS: Final[LiteralString] = """
SELECT m.id, m.attempt_count
FROM pgoutbox.message_live AS m
WHERE m.queue = ANY (%(queues)s::text[])
    AND m.state = 'sending'
    AND m.worker = %(worker)s::text
    AND m.claimed_at > coalesce(%(after)s::timestamptz, '-infinity')
    AND m.claimed_at < coalesce(%(before)s::timestamptz, 'infinity')
"""

# The queues of other messages of the same keys, which had to wait for these attempts. This runs after the finish is
# committed, because a claim before the commit found these attempts still in flight. By the rule `pending` an older
# message may wait.
QUEUES_OF_SUCCESSORS: Final[LiteralString] = """
WITH done AS (
    SELECT d.id, d.topic, d.coalesce_key
    FROM unnest(%(ids)s::bigint[], %(topics)s::text[], %(coalesce_keys)s::text[]) AS d(id, topic, coalesce_key)
)
SELECT m.queue
FROM done AS d
JOIN pgoutbox.coalesce AS head ON head.topic = d.topic AND head.coalesce_key = d.coalesce_key
JOIN pgoutbox.message_live AS m ON m.id = head.newest_id
WHERE head.newest_id <> d.id AND m.state = 'pending' AND m.available_at <= now()
UNION
SELECT m.queue
FROM done AS d
JOIN pgoutbox.message_live AS m ON m.topic = d.topic AND m.coalesce_key = d.coalesce_key
WHERE m.coalesces_pending AND m.state = 'pending' AND m.available_at <= now() AND m.id <> d.id
"""

# One row per attempt that still holds its message. A transaction that cancels the message keeps its row locked. Then
# the lease is renewed in the table `renewal`, unless it has lapsed: after the end of that transaction, another worker
# might claim the message before this worker writes the outcome.
RENEW_IF_HELD: Final[LiteralString] = """
WITH asked(id, attempt_count) AS (
    SELECT * FROM unnest(%(ids)s::bigint[], %(attempt_counts)s::integer[])
), locked AS MATERIALIZED (
    SELECT m.id, m.attempt_count
    FROM asked AS a
    JOIN pgoutbox.message_live AS m ON m.id = a.id
    WHERE m.state = 'sending' AND m.attempt_count = a.attempt_count AND m.worker = %(worker)s::text
    FOR UPDATE OF m SKIP LOCKED
), renewed AS (
    UPDATE pgoutbox.message_live AS m
    SET lease_expires_at = now() + make_interval(secs => %(lease_seconds)s::float8)
    FROM locked AS l
    WHERE m.id = l.id AND m.state = 'sending' AND m.attempt_count = l.attempt_count
    RETURNING m.id
), beside AS (
    INSERT INTO pgoutbox.renewal (message_id, attempt_count, worker, lease_expires_at)
    SELECT m.id, m.attempt_count, m.worker, now() + make_interval(secs => %(lease_seconds)s::float8)
    FROM asked AS a
    JOIN pgoutbox.message_live AS m ON m.id = a.id
    WHERE m.state = 'sending' AND m.attempt_count = a.attempt_count AND m.worker = %(worker)s::text
        AND m.id <> ALL (ARRAY(SELECT l.id FROM locked AS l))
        AND greatest(m.lease_expires_at, pgoutbox.renewed_until(m.id, m.attempt_count, m.worker)) > now()
    ON CONFLICT ON CONSTRAINT renewal_pkey DO UPDATE
    SET attempt_count = excluded.attempt_count,
        worker = excluded.worker,
        lease_expires_at = excluded.lease_expires_at
    RETURNING message_id
)
SELECT
    m.id,
    m.cancel_requested_at IS NOT NULL AS cancelled,
    coalesce(head.newest_id > m.id, false) AS superseded,
    r.id IS NOT NULL OR b.message_id IS NOT NULL OR m.lease_expires_at > now() AS in_lease
FROM asked AS a
JOIN pgoutbox.message_live AS m ON m.id = a.id
LEFT JOIN pgoutbox.coalesce AS head
    ON head.topic = m.topic AND head.coalesce_key = m.coalesce_key AND m.coalesces_pending IS NOT TRUE
LEFT JOIN renewed AS r ON r.id = m.id
LEFT JOIN beside AS b ON b.message_id = m.id
WHERE m.state = 'sending' AND m.attempt_count = a.attempt_count AND m.worker = %(worker)s::text
"""

# The same answer without the write.
WATCH_IF_HELD: Final[LiteralString] = """
SELECT
    m.id,
    m.cancel_requested_at IS NOT NULL AS cancelled,
    coalesce(head.newest_id > m.id, false) AS superseded,
    greatest(m.lease_expires_at, pgoutbox.renewed_until(m.id, m.attempt_count, m.worker)) > now() AS in_lease
FROM unnest(%(ids)s::bigint[], %(attempt_counts)s::integer[]) AS a(id, attempt_count)
JOIN pgoutbox.message_live AS m ON m.id = a.id
LEFT JOIN pgoutbox.coalesce AS head
    ON head.topic = m.topic AND head.coalesce_key = m.coalesce_key AND m.coalesces_pending IS NOT TRUE
WHERE m.state = 'sending' AND m.attempt_count = a.attempt_count AND m.worker = %(worker)s::text
"""
