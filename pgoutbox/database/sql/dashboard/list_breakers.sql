-- The open breakers, newest first, with the pending messages behind each, due or not: those of its holds, and those that it
-- has postponed last. They are counted among those of each queue that are due first: with `is_sample` there may be more.
\ir _live_queue_names.sql
, held AS MATERIALIZED (
    -- Looked up by their text: to search the breakers for each message takes too long with hundreds of them.
    SELECT
        jsonb_object_agg(h.hold, h.breaker_key) AS breaker_keys,
        jsonb_object_agg(split_part(h.hold, ' ', 1) || ' ' || split_part(h.hold, ' ', 2), true) AS names
    FROM (
        SELECT hold.text AS hold, min(b.key) AS breaker_key
        FROM pgoutbox.breaker_view AS b
        CROSS JOIN LATERAL unnest(b.holds) AS hold(text)
        GROUP BY hold.text
    ) AS h
), waiting AS MATERIALIZED (
    SELECT
        coalesce(
            -- The destination is read only where a breaker can hold the message: the view redacts it, which is slow.
            CASE WHEN (SELECT h.names FROM held AS h)
                ? (l.queue || ' ' || pgoutbox._handled_as(one.topic, one.payload_version))
            THEN (
                SELECT
                    (SELECT h.breaker_keys FROM held AS h)
                        ->> pgoutbox._hold_of(m.queue, m.topic, m.payload_version, m.destination)
                FROM pgoutbox.message_view AS m
                WHERE m.id = one.id AND m.state = 'pending'
                LIMIT 1
            ) END,
            one.breaker_key
        ) AS breaker_key,
        count(*) OVER (PARTITION BY l.queue, one.part) >= l.rows AS is_capped
    FROM (
        SELECT
            named.queue,
            'infinity'::timestamptz AS until_at,
            greatest(5, 10 * %(rows)s::bigint / count(*) OVER ()) AS rows
        FROM named
        -- Without an open breaker nothing is read.
        WHERE EXISTS (SELECT FROM pgoutbox.breaker_view)
    ) AS l
    CROSS JOIN LATERAL (
        \ir ../doctor/_pending.sql
    ) AS one
), behind AS (
    SELECT
        w.breaker_key,
        count(*) AS messages
    FROM waiting AS w
    GROUP BY w.breaker_key
)
SELECT
    b.key,
    b.opened_at,
    b.retry_at,
    b.probe_until,
    b.cooldown_seconds,
    b.worker,
    b.last_error,
    coalesce(w.messages, 0) AS waiting_count,
    (SELECT bool_or(every.is_capped) FROM waiting AS every) IS TRUE
        OR (SELECT count(*) FROM named) >= %(queues)s::bigint AS is_sample
FROM pgoutbox.breaker_view AS b
LEFT JOIN behind AS w ON w.breaker_key = b.key
ORDER BY b.opened_at DESC, b.key
LIMIT %(limit)s::bigint
