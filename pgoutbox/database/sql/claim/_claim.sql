-- Record the claim of the attempts that the CTE `judged` begins, with one lease for all of them. Its worker counts the
-- lease from the time before the transaction, so the lease never ends before the worker expects it. `claimed_at` is part
-- of the claim's name, so it is the real time: a transaction may have several claims.
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
