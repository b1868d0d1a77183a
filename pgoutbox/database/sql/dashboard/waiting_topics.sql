-- The pending messages of each topic: of each queue those that are due first. They are all there are, unless
-- `is_capped`: then more may wait behind them or in further queues, of any topic.
\ir _live_queue_names.sql
, counted AS (
    SELECT
        one.topic,
        one.id,
        one.available_at,
        one.has_failed,
        count(*) OVER (PARTITION BY l.queue, one.part) >= l.rows AS is_capped
    FROM (
        SELECT
            named.queue,
            'infinity'::timestamptz AS until_at,
            greatest(5, 10 * %(rows)s::bigint / count(*) OVER ()) AS rows
        FROM named
        WHERE named.number > 0
    ) AS l
    CROSS JOIN LATERAL (
        \ir ../doctor/_pending.sql
    ) AS one
)
SELECT
    c.topic,
    count(*) AS messages,
    count(*) FILTER (WHERE c.available_at <= now()) AS due,
    (array_agg(c.id ORDER BY c.available_at, c.id))[1] AS first_id,
    max(c.id) FILTER (WHERE c.has_failed) AS tried_id,
    (SELECT bool_or(every.is_capped) FROM counted AS every)
        OR (SELECT max(named.number) FROM named) >= %(queues)s::bigint AS is_capped
FROM counted AS c
GROUP BY c.topic
ORDER BY c.topic
LIMIT %(topics)s::bigint
