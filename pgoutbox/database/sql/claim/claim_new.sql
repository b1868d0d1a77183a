-- Claim up to `total` fresh messages that were enqueued recently, in the order of ids. The worker runs this for queues
-- without limits when it has already seen every message up to `seen_id`: the scan reads only the end of the primary
-- key. The parts are those of claim_fresh.sql.
WITH judged AS MATERIALIZED (
    \ir _due.sql
        -- A message that was never attempted is always pending.
        AND m.attempt_count = 0
        AND m.id > %(seen_id)s::bigint
        -- Queues that are paused or have limits are left to the claims by permits.
        AND NOT pgoutbox._is_limited(%(queue)s::text)
    ORDER BY m.id
    \ir _locked.sql
)
\ir _begin.sql
