-- Tokens in the bucket of a limited queue, as a fraction; null without a rate. If the clock was set back, for example
-- by a failover, no tokens are lost.
CREATE FUNCTION pgoutbox._bucket_of(limited pgoutbox.queue, at timestamptz)
RETURNS double precision
LANGUAGE sql
IMMUTABLE
RETURN least(
    limited.burst,
    limited.tokens OPERATOR(pg_catalog.+) (
        greatest(0, extract(epoch FROM at OPERATOR(pg_catalog.-) limited.tokens_at)::double precision)
        OPERATOR(pg_catalog.*) limited.tokens_per_second
    )
);
