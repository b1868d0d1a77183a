-- Number of attempts of a queue that its rate and its ceiling allow now, as a fraction, and when they allow the next one
-- if it is below one; null without a rate. The bucket spreads the attempts, and the number of attempts of the last
-- period keeps the rate: alone, a bucket that is filled at the pace of the whole rate would let a period exceed it by a
-- burst, and a slower one would never reach it.
CREATE FUNCTION pgoutbox._tokens_of(limited pgoutbox.queue, OUT tokens double precision, OUT next_at timestamptz)
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    at constant timestamptz := clock_timestamp();
    period record;
    before bigint;
BEGIN
    tokens := pgoutbox._bucket_of(limited, at);
    IF tokens < 1 THEN
        next_at := at + make_interval(secs => (1 - tokens) / limited.tokens_per_second);
    END IF;
    FOR period IN
        SELECT p.most, make_interval(secs => p.seconds) AS length
        FROM (
            VALUES (limited.rate_count, limited.rate_seconds), (limited.ceiling_count, limited.ceiling_seconds)
        ) AS p(most, seconds)
        WHERE limited.rate_count IS NOT NULL AND p.most IS NOT NULL
    LOOP
        -- Without the condition on begun_count, a row of the queue's settings that was deleted and written again could
        -- begin too many attempts: its number begins at zero again.
        SELECT c.begun_count - c.attempt_count
        INTO before
        FROM pgoutbox.rate_claim AS c
        WHERE c.queue = limited.name AND c.claimed_at > at - period.length AND c.begun_count <= limited.begun_count
        ORDER BY c.claimed_at
        LIMIT 1;
        tokens := greatest(0, least(tokens, period.most - (limited.begun_count - before)));
        IF limited.begun_count - before >= period.most THEN
            next_at := greatest(next_at, (
                SELECT c.claimed_at + period.length
                FROM pgoutbox.rate_claim AS c
                WHERE c.queue = limited.name
                    AND c.claimed_at > at - period.length
                    AND c.begun_count > limited.begun_count - period.most
                ORDER BY c.claimed_at
                LIMIT 1
            ));
        END IF;
    END LOOP;
END
$function$;
