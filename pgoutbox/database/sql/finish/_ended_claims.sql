-- Delete claims of this worker whose attempts have all ended.
DELETE FROM pgoutbox.claim AS c
WHERE c.worker = %(worker)s::text AND c.claimed_at = ANY (%(ended_claims)s::timestamptz[])
