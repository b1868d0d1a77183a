-- The number of open and half-open breakers, by scheme only: the rest of a breaker's key is a part of destinations,
-- which may be private.
SELECT
    split_part(b.key, ':', 1) AS scheme,
    CASE WHEN b.retry_at > now() THEN 'open' ELSE 'half_open' END AS state,
    count(*) AS count
FROM pgoutbox.breaker_view AS b
GROUP BY 1, 2
ORDER BY 1, 2
LIMIT 100
