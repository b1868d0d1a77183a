-- The pending messages of each topic: of each given queue those that are due first. They are all there are, unless
-- `is_capped`: then more may wait behind them, of any topic, or in queues beyond the first `queues`.
WITH counted AS (
    SELECT
        one.topic,
        one.payload_version,
        one.id,
        one.available_at,
        one.has_failed,
        l.queue,
        one.part,
        l.rows
    FROM (
        SELECT
            named.queue,
            'infinity'::timestamptz AS until_at,
            greatest(5, 10 * %(rows)s::bigint / count(*) OVER ()) AS rows
        FROM unnest(%(names)s::text[]) AS named(queue)
    ) AS l
    CROSS JOIN LATERAL (
        \ir ../doctor/_pending.sql
    ) AS one
)
SELECT
    c.topic,
    count(*) AS waiting,
    count(*) FILTER (WHERE c.available_at <= now()) AS due,
    (array_agg(c.id ORDER BY c.available_at, c.id))[1] AS first_id,
    max(c.id) FILTER (WHERE c.has_failed) AS tried_id,
    max(c.payload_version) AS newest_version,
    EXISTS (SELECT FROM counted AS e GROUP BY e.queue, e.part, e.rows HAVING count(*) >= e.rows)
        OR cardinality(%(names)s::text[]) >= %(queues)s::bigint AS is_capped
FROM counted AS c
GROUP BY c.topic
ORDER BY c.topic
LIMIT %(topics)s::bigint
