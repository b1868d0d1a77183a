-- Pending messages by scheme of the destination: of each given queue those that are due first. They are all there are, unless
-- `is_capped`: then others may wait behind them. The view redacts each destination, which is slow, so few rows are read.
WITH counted AS (
    SELECT one.destination, count(*) OVER (PARTITION BY l.queue, one.part) >= l.rows AS is_capped
    FROM (
        SELECT
            named.queue,
            'infinity'::timestamptz AS until_at,
            greatest(5, %(rows)s::bigint / count(*) OVER ()) AS rows
        FROM unnest(%(names)s::text[]) AS named(queue)
    ) AS l
    CROSS JOIN LATERAL (
        \ir _pending.sql
    ) AS one
)
SELECT
    CASE WHEN strpos(c.destination, ':') > 0 THEN lower(split_part(c.destination, ':', 1)) END AS scheme,
    count(*) AS messages,
    (SELECT bool_or(every.is_capped) FROM counted AS every) AS is_capped
FROM counted AS c
GROUP BY 1
ORDER BY 1
LIMIT 1000
