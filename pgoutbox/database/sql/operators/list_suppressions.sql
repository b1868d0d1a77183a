-- The suppressions in force, the newest first: of an address if it is given.
SELECT s.digest, s.mailing_list, s.reason, s.created_at
FROM pgoutbox.suppression_view AS s
WHERE s.ended_at IS NULL
    AND (%(address)s::text IS NULL OR s.digest = pgoutbox.address_digest(%(address)s::text))
ORDER BY s.created_at DESC, s.digest, s.mailing_list
LIMIT %(limit)s::bigint
