-- The open breakers, newest first, with the pending messages behind each, due or not: those of its holds, and those that it
-- has postponed last. They are counted among those of each queue that are due first: with `is_sample` there may be more.
\ir _live_queue_names.sql
, waiting AS MATERIALIZED (
    SELECT
        coalesce(
            (
                SELECT min(b.key)
                FROM pgoutbox.breaker_view AS b
                WHERE pgoutbox._hold_of(l.queue, one.topic, one.destination) = ANY (b.holds)
            ),
            (
                SELECT m.breaker_key
                FROM pgoutbox.message_view AS m
                WHERE m.id = one.id AND m.state = 'pending'
                LIMIT 1
            )
        ) AS breaker_key,
        count(*) OVER (PARTITION BY l.queue, one.part) >= l.rows AS is_capped
    FROM (
        SELECT
            named.queue,
            'infinity'::timestamptz AS until_at,
            greatest(20, 10 * %(rows)s::bigint / count(*) OVER ()) AS rows
        FROM named
        -- Without an open breaker nothing is read.
        WHERE named.number > 0 AND EXISTS (SELECT FROM pgoutbox.breaker_view)
    ) AS l
    CROSS JOIN LATERAL (
        \ir ../doctor/_pending.sql
    ) AS one
)
SELECT
    b.key,
    b.opened_at,
    b.retry_at,
    b.probe_until,
    b.cooldown_seconds,
    b.worker,
    b.last_error,
    (SELECT count(*) FROM waiting AS w WHERE w.breaker_key = b.key) AS waiting_count,
    (SELECT bool_or(w.is_capped) FROM waiting AS w) IS TRUE AS is_sample
FROM pgoutbox.breaker_view AS b
ORDER BY b.opened_at DESC, b.key
LIMIT %(limit)s::bigint
