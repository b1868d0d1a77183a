-- Finish attempts as sent whose messages a retention rule may delete at once: it deletes those that the rules name, and the
-- others become sent. Returns the messages that the attempts still held. A locked row is left out and tried again later.
WITH held AS MATERIALIZED (
    SELECT m.id, m.attempt_count, m.claimed_at
    FROM pgoutbox.message_live AS m
    WHERE m.id = ANY (%(ids)s::bigint[]) AND m.state = 'sending' AND m.worker = %(worker)s::text
        -- The fence of finish.sql.
        AND m.attempt_count = (%(attempt_counts)s::integer[])[width_bucket(m.id, %(ids)s::bigint[])]
        AND m.claimed_at = (%(claimed_ats)s::timestamptz[])[width_bucket(m.id, %(ids)s::bigint[])]
    FOR UPDATE OF m SKIP LOCKED
), forgotten AS MATERIALIZED (
    SELECT f.id
    -- The function reads the rules, so that a removed rule has no effect. A worker has no privilege to delete.
    FROM pgoutbox._forget_sent(
        ARRAY(SELECT h.id FROM held AS h), ARRAY(SELECT h.attempt_count FROM held AS h),
        ARRAY(SELECT h.claimed_at FROM held AS h), %(worker)s::text
    ) AS f(id)
), kept AS (
    UPDATE pgoutbox.message AS m
    SET state = 'sent',
        finished_at = now(),
        key_in_flight = NULL
    FROM held AS h
    WHERE m.id = h.id
        AND m.id = ANY (%(ids)s::bigint[])
        AND m.state = 'sending'
        AND m.id <> ALL (ARRAY(SELECT f.id FROM forgotten AS f))
    RETURNING m.id
)
SELECT f.id FROM forgotten AS f
UNION ALL
SELECT k.id FROM kept AS k
