-- Attempts of this worker whose claim may not have been answered: they have its name, and are younger than its last
-- answered claim (`after`; null if there is none). Without that time, an attempt whose outcome a failover has lost would
-- look the same: its handler has run, so it must count as lost.
SELECT v.id, v.attempt_count, v.claimed_at
FROM pgoutbox.in_flight_view AS v
WHERE v.worker = %(worker)s::text AND v.claimed_at > coalesce(%(after)s::timestamptz, '-infinity')
