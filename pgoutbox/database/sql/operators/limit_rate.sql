-- Limit the rate of a queue, or remove the limit with a null `count`. The trigger queue_ceiling sets the tokens: the bucket
-- begins full, and when the rate changes it keeps its tokens, up to the new burst. Attempts that have begun still count.
INSERT INTO pgoutbox.queue AS q (name, rate_count, rate_seconds, burst)
VALUES (%(queue)s::text, %(count)s::integer, %(seconds)s::float8, %(burst)s::integer)
ON CONFLICT ON CONSTRAINT queue_pkey DO UPDATE
SET rate_count = excluded.rate_count,
    rate_seconds = excluded.rate_seconds,
    burst = excluded.burst
RETURNING q.name
