-- Delete those of these messages, which were sent, that a retention rule deletes at once. It runs before the finish, which
-- does not find them any more. Returns the deleted messages. A locked row is left to the finish.
WITH held AS MATERIALIZED (
    SELECT m.id, m.attempt_count, m.claimed_at
    FROM pgoutbox.message_live AS m
    WHERE m.id = ANY (%(ids)s::bigint[]) AND m.state = 'sending' AND m.worker = %(worker)s::text
        -- The fence of finish.sql.
        AND m.attempt_count = (%(attempt_counts)s::integer[])[width_bucket(m.id, %(ids)s::bigint[])]
        AND m.claimed_at = (%(claimed_ats)s::timestamptz[])[width_bucket(m.id, %(ids)s::bigint[])]
    FOR UPDATE OF m SKIP LOCKED
)
SELECT f.id
-- The function reads the rules, so that a removed rule has no effect. A worker has no privilege to delete.
FROM pgoutbox._forget_sent(
    ARRAY(SELECT h.id FROM held AS h), ARRAY(SELECT h.attempt_count FROM held AS h),
    ARRAY(SELECT h.claimed_at FROM held AS h), %(worker)s::text
) AS f(id)
