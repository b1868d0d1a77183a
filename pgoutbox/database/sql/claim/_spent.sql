-- Take one token for each attempt that begins. The row of the queue is locked since pgoutbox._permits(). Tokens are
-- taken with the claim and not after the delivery: a crash between the two uses them up instead of exceeding the rate.
UPDATE pgoutbox.queue AS q
SET tokens = greatest(0, pgoutbox._tokens_of(q) - begun.count), tokens_at = clock_timestamp()
FROM (SELECT count(*) AS count FROM judged AS j WHERE j.state = 'sending') AS begun
WHERE q.name = %(queue)s::text AND q.rate_count IS NOT NULL AND begun.count > 0
