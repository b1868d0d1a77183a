-- The number of tokens in the bucket. If the clock was set back, for example by a failover, no tokens are lost.
CREATE FUNCTION pgoutbox._tokens_of(limited pgoutbox.queue)
RETURNS double precision
LANGUAGE sql
VOLATILE
RETURN least(
    limited.burst,
    limited.tokens OPERATOR(pg_catalog.+) (
        greatest(
            0,
            extract(epoch FROM pg_catalog.clock_timestamp() OPERATOR(pg_catalog.-) limited.tokens_at)::double precision
        ) OPERATOR(pg_catalog.*) limited.tokens_per_second
    )
);

COMMENT ON FUNCTION pgoutbox._tokens_of IS 'Tokens of a limited queue now, as a fraction; null without a rate.';
