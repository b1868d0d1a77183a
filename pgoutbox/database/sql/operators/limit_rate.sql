-- Limit the rate of a queue, or remove the limit with a null `count`. The bucket begins full. When the rate changes it
-- keeps its tokens, up to the new burst.
WITH limited AS (
    INSERT INTO pgoutbox.queue AS q (name, rate_count, rate_seconds, burst, tokens, tokens_at)
    SELECT a.name, a.rate_count, a.rate_seconds, a.burst, a.burst, CASE WHEN a.rate_count IS NOT NULL THEN now() END
    FROM (
        VALUES (%(queue)s::text, %(count)s::integer, %(seconds)s::float8, %(burst)s::integer)
    ) AS a(name, rate_count, rate_seconds, burst)
    ON CONFLICT ON CONSTRAINT queue_pkey DO UPDATE
    SET rate_count = excluded.rate_count,
        rate_seconds = excluded.rate_seconds,
        burst = excluded.burst,
        tokens = CASE
            WHEN excluded.rate_count IS NOT NULL
                THEN least(excluded.tokens, coalesce(pgoutbox._tokens_of(q), excluded.tokens))
        END,
        tokens_at = CASE WHEN excluded.rate_count IS NOT NULL THEN clock_timestamp() END
    RETURNING q.name
)
-- All idle workers are woken, because they may wait for a later permit, or for none.
SELECT l.name, CASE WHEN pg_notification_queue_usage() < 0.9 THEN pg_notify('pgoutbox', 'all ' || l.name) END
FROM limited AS l
