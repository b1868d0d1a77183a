-- Record the claim of the attempts that the CTE `judged` begins, with one lease for all of them. The lease begins with the
-- transaction, so it never ends later than its worker believes; the time of the claim is its name, so it is the real time.
INSERT INTO pgoutbox.claim (claimed_at, lease_expires_at, queue, worker, ids)
SELECT
    clock_timestamp(),
    now() + make_interval(secs => %(lease_seconds)s::float8),
    %(queue)s::text,
    %(worker)s::text,
    array_agg(j.id)
FROM judged AS j
WHERE j.state = 'sending'
HAVING count(*) > 0
RETURNING claimed_at
