-- Write what the CTE `judged` has decided. The attempt count rises with each attempt. State, attempt count,
-- worker and claim are the fence: a write of an outcome that names other values changes nothing.
UPDATE pgoutbox.message AS m
SET state = j.state,
    attempt_count = m.attempt_count + CASE WHEN j.state = 'sending' THEN 1 ELSE 0 END,
    claimed_at = CASE WHEN j.state = 'sending' THEN (SELECT c.claimed_at FROM claim AS c) ELSE m.claimed_at END,
    worker = CASE WHEN j.state = 'sending' THEN %(worker)s::text ELSE m.worker END,
    key_in_flight = CASE WHEN j.state = 'sending' THEN coalesce(m.coalesce_key, m.ordering_key) END,
    finished_at = CASE WHEN j.state <> 'sending' THEN now() END,
    skip_reason = CASE WHEN j.state = 'skipped' THEN coalesce('superseded by ' || j.newer_id, 'expired') END,
    superseded_by = CASE WHEN j.state = 'skipped' THEN j.newer_id END
FROM (
    SELECT *
    FROM judged
    -- The UPDATE enters the keys into the unique indexes on keys in flight in this order: a nested loop keeps it.
    -- Without one order for all claims, two claims could deadlock. Messages without a key enter nothing: the CASE
    -- spares comparing topics.
    ORDER BY key, CASE WHEN key IS NOT NULL THEN topic END
) AS j
-- `place` is where the row was locked. By its id alone PostgreSQL may plan to scan the whole primary key with its dead
-- entries, because statistics may describe an empty table. A row that has a newer version since this statement
-- began is left to the next claim.
WHERE m.ctid = j.place AND m.id = j.id AND m.state = 'pending'
RETURNING
    \ir _returned.sql
