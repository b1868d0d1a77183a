-- Finish the attempt of a transactional handler as sent, in the handler's transaction. Its COMMIT travels with it, so it
-- raises an error if the attempt does not hold its message, or if the handler has ended its transaction.
SELECT pgoutbox._require_completion(
    %(name)s::text,
    pgoutbox._complete(
        %(id)s::bigint, %(attempt_count)s::integer, %(worker)s::text, %(claimed_at)s::timestamptz
    )
)
