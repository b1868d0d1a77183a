-- Finish attempts as sent where a retention rule may delete sent messages at once. A message with such a rule is
-- deleted with the history of its attempts; the others become `sent`. The worker runs it.
-- The dedupe key stays as long as its rule keeps it: the message was sent, and its repetition is a duplicate.
WITH held AS MATERIALIZED (
    SELECT m.id, m.attempt_count, m.claimed_at
    FROM pgoutbox.message_live AS m
    WHERE m.id = ANY (%(ids)s::bigint[])
        \ir _fence.sql
    -- As in finish_if_held.sql, a locked row must not delay the batch.
    FOR UPDATE OF m SKIP LOCKED
), forgotten AS MATERIALIZED (
    SELECT f.id
    -- The function reads the rules, so that a removed rule has no effect at once. It deletes with its owner's rights,
    -- so that a worker needs no privilege to delete. The arrays have the order of `held`.
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
        AND h.id <> ALL (ARRAY(SELECT f.id FROM forgotten AS f))
    RETURNING m.id, m.state
)
SELECT k.id, k.state FROM kept AS k
UNION ALL
SELECT f.id, 'sent' FROM forgotten AS f
