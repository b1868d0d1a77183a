-- The next suppressions in force after a digest and a mailing list.
SELECT s.digest, s.mailing_list, s.reason, s.detail, s.created_at
FROM pgoutbox.suppression_view AS s
WHERE s.ended_at IS NULL
    AND s.digest >= %(digest)s::text
    AND (s.digest, coalesce(s.mailing_list, '')) > (%(digest)s::text, %(mailing_list)s::text)
ORDER BY s.digest, coalesce(s.mailing_list, '')
LIMIT %(limit)s::bigint
