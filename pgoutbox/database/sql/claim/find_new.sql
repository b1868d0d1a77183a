-- The messages that claim_new.sql would claim, see find_fresh.sql.
WITH due AS MATERIALIZED (
    \ir _due.sql
        -- A message that was never attempted is always pending.
        AND m.attempt_count = 0
        AND m.id > %(seen_id)s::bigint
        -- Queues that are paused or have limits are left to the claims by permits.
        AND NOT pgoutbox._is_limited(%(queue)s::text)
    ORDER BY m.id
    \ir _locked.sql
)
SELECT d.id
FROM due AS d
