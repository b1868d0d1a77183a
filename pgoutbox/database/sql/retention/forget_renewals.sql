-- Delete old renewals of locked rows. A renewal lasts for one lease, which is at most a day.
DELETE FROM pgoutbox.renewal AS r
WHERE r.lease_expires_at < now() - interval '1 day'
RETURNING r.lease_expires_at
