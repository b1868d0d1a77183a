-- Take one token for each attempt that begins, and count it: the trigger queue_attempts records the time. The row of the
-- queue is locked since pgoutbox._permits(). Tokens are taken with the claim and not after the delivery: a crash between
-- the two uses them up instead of exceeding the rate. The times rise even if the clock is set back.
UPDATE pgoutbox.queue AS q
SET tokens = greatest(0, pgoutbox._bucket_of(q, begun.at) - begun.count),
    tokens_at = greatest(begun.at, q.tokens_at + interval '1 us'),
    begun_count = q.begun_count + begun.count
FROM (
    SELECT (SELECT c.claimed_at FROM claim AS c) AS at, count(*) AS count FROM judged AS j WHERE j.state = 'sending'
) AS begun
WHERE q.name = %(queue)s::text AND q.rate_count IS NOT NULL AND begun.count > 0
