-- End up to `total` lapsed attempts of a queue whose message is not tried again. The worker runs this before
-- claim_lapsed.sql. It is a separate statement because these attempts do not wait for a limit: a newer message of their
-- key may wait for them.
-- Guards: row locks, and the check of state and attempt count in the UPDATE.
WITH judged AS MATERIALIZED (
    \ir _lapsed.sql
        AND m.queue = %(queue)s::text
        AND ending.state IS NOT NULL
    ORDER BY m.lease_expires_at, m.id
    \ir _locked.sql
), lost AS (
    \ir _lost.sql
)
\ir _end.sql
