-- Claim up to `total` due messages that were never attempted, by due time from the place where the last claim ended. The
-- worker runs this for queues without limits. Messages with an ordering key have their own lane, see find_ordered.sql.
-- The parts: `judged` chooses and locks rows, and decides what becomes of each (_due.sql); `claim` writes the
-- lease of those that begin (_claim.sql); the UPDATE writes the decisions (_begin.sql). The worker holds the locks until it commits, right after this statement.
-- Guards: row locks, the place of the row in the UPDATE, the unique index on keys in flight.
WITH judged AS MATERIALIZED (
    \ir _due.sql
        \ir _fresh.sql
        -- Queues that are paused or have limits are left to the claims by permits.
        AND NOT pgoutbox._is_limited(%(queue)s::text)
    ORDER BY m.available_at, m.id
    \ir _locked.sql
), claim AS (
    \ir _claim.sql
)
\ir _begin.sql
