-- End up to `total` superseded lapsed attempts of other queues than `queues`. Every worker runs this periodically: a
-- newer message of their key cannot be claimed before they end, and their own queue may no longer have a worker.
-- Guards: row locks, and the place of the row in the UPDATE.
WITH judged AS MATERIALIZED (
    \ir _lapsed.sql
        AND c.queue <> ALL (%(queues)s::text[])
        AND head.newest_id IS NOT NULL
    ORDER BY c.lease_expires_at, m.id
    \ir _locked.sql
    FOR SHARE OF c SKIP LOCKED
), lost AS (
    \ir _lost.sql
)
\ir _end.sql
