-- Finish attempts of a transactional handler as sent, in the handler's transaction. Its COMMIT travels with it, so it
-- raises an error if an attempt does not hold its message, or if a handler has ended the transaction.
SELECT pgoutbox._require_completion(
    pgoutbox._complete(
        %(ids)s::bigint[], %(attempt_counts)s::integer[], %(worker)s::text, %(claimed_ats)s::timestamptz[]
    )
)
