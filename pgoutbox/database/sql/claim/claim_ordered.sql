-- Claim messages that find_ordered.sql or find_new_ordered.sql found. The worker runs it for queues with and without
-- limits. It checks again the conditions that may have changed since then. If another worker claimed a message
-- meanwhile, PostgreSQL checks state and due time on the newest version. The unique index
-- message_live_ordered_in_flight guards "one message of a key in flight". The parts are those of
-- claim_fresh_by_permits.sql.
WITH judged AS MATERIALIZED (
    -- Ordered messages have no coalesce key, so no newer message supersedes them.
    SELECT m.ctid AS place, m.id, m.topic, m.ordering_key AS key, NULL::bigint AS newer_id,
        CASE
            WHEN EXISTS (
                SELECT FROM pgoutbox.cancel_request AS c WHERE c.message_id = m.id AND c.message_created_at = m.created_at
            ) THEN 'cancelled'
            WHEN m.expires_at <= now() THEN 'skipped'
            ELSE 'sending'
        END AS state
    FROM pgoutbox.message_live AS m
    WHERE m.id = ANY (%(ids)s::bigint[])
        AND m.state = 'pending'
        AND m.available_at <= now()
        -- OFFSET 0 makes PostgreSQL look up each key in the index, whatever the statistics say.
        AND NOT EXISTS (
            SELECT FROM pgoutbox.message_live AS earlier
            WHERE earlier.queue = m.queue AND earlier.ordering_key = m.ordering_key AND earlier.id < m.id
            OFFSET 0
        )
        AND NOT EXISTS (
            SELECT FROM pgoutbox.message_live AS other
            WHERE other.queue = m.queue AND other.key_in_flight = m.ordering_key AND other.ordering_key IS NOT NULL
            OFFSET 0
        )
        AND NOT EXISTS (
            -- A message before it that has failed halts the key. It may have been redriven and have failed again since.
            SELECT FROM pgoutbox.message_failed AS f
            WHERE f.queue = m.queue AND f.ordering_key = m.ordering_key AND f.halts_key AND f.id < m.id
            OFFSET 0
        )
    ORDER BY m.available_at, m.id
    \ir _locked_by_permits.sql
), claim AS (
    \ir _claim.sql
), spent AS (
    \ir _spent.sql
)
\ir _begin.sql
