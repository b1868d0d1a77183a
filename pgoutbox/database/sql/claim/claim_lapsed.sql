-- Take over the oldest lapsed attempt of a suspect in a queue: its message has used up half of its attempts, or was in
-- flight beside one that has lost several of them. It may have crashed its process, and may do so again, so a worker has only one such message
-- in flight: `total` is 1. The attempt before is recorded as lost. The message stays in flight, with its key. end_lapsed.sql ends all other lapsed attempts.
-- Guards: row locks, and the place of the row in the UPDATE.
WITH judged AS MATERIALIZED (
    \ir _lapsed.sql
        AND c.queue = %(queue)s::text
        AND ending.state = 'sending'
    ORDER BY c.lease_expires_at, m.id
    \ir _locked_by_permits.sql
    FOR UPDATE OF c SKIP LOCKED
), claim AS (
    \ir _claim.sql
), spent AS (
    \ir _spent.sql
)
UPDATE pgoutbox.message AS m
SET attempt_count = m.attempt_count + 1,
    claimed_at = (SELECT c.claimed_at FROM claim AS c),
    worker = %(worker)s::text,
    last_error = 'attempt ' || j.attempt_count || ': lease of ' || j.worker || ' expired, outcome unknown',
    attempts =
        \ir _lost.sql
FROM judged AS j
-- `place` is where the row was locked. A row that has changed since this statement's snapshot does not match. The state
-- restricts the plan to one partition.
WHERE m.ctid = j.place AND m.id = j.id AND m.state = 'sending'
RETURNING
    \ir _returned.sql
