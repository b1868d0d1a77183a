-- Renew the leases of these claims of a worker. One that has lapsed is renewed too, for the attempts that nobody has
-- taken over: watch_if_held.sql tells which those are.
UPDATE pgoutbox.claim AS c
SET lease_expires_at = now() + make_interval(secs => %(lease_seconds)s::float8)
WHERE c.worker = %(worker)s::text AND c.claimed_at = ANY (%(claimed_ats)s::timestamptz[])
