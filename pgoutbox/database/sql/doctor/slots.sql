-- Replication slots that retain much WAL, or have lost it.
SELECT s.slot_name::text AS name, s.active AS is_active, s.wal_status, retained.bytes
FROM pg_catalog.pg_replication_slots AS s
CROSS JOIN LATERAL (
    SELECT pg_wal_lsn_diff(
        -- A standby has no write position.
        CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() ELSE pg_current_wal_lsn() END,
        s.restart_lsn
    )::bigint AS bytes
) AS retained
WHERE retained.bytes >= %(bytes)s::bigint OR s.wal_status IN ('unreserved', 'lost')
ORDER BY retained.bytes DESC NULLS LAST
LIMIT 10
