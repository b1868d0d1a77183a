-- The waiting time of the oldest due message of each queue, 0 without one, and whether it waits for the end of a pause: for
-- queues with live messages, limits or a pause. While a topic is paused, it also looks for the first message of each lane
-- that belongs to no paused topic, and while a fair key is paused, for the first one of the other keys, of which it reads
-- 10,000. Otherwise it reads one row of each lane, whatever the size of the backlog: this gauge must not disappear when the
-- backlog is largest. At most `max_label_values` queues, those that wait longest, are reported separately; all others have
-- the name `other`.
\ir ../dashboard/_live_queue_names.sql
, waiting AS (
    SELECT
        n.queue,
        one.is_paused,
        greatest(0, extract(epoch FROM now() - min(one.available_at))::float8) AS seconds
    FROM named AS n
    LEFT JOIN pgoutbox.queue_view AS q ON q.name = n.queue
    CROSS JOIN LATERAL (
        -- A queue without a due message has a row too.
        SELECT coalesce(q.is_paused, false) AS is_paused, NULL::timestamptz AS available_at
        UNION ALL
        SELECT
            coalesce(q.is_paused, false) OR lane.is_paused_key
                OR lane.topic IN (SELECT p.topic FROM pgoutbox.topic_pause_view AS p),
            lane.available_at
        FROM (VALUES (false), (true)) AS kind(leaves_out_paused)
        CROSS JOIN LATERAL (
            SELECT first.*
            FROM (VALUES (0), (1)) AS l(number)
            CROSS JOIN LATERAL (
                SELECT m.topic, m.available_at, false AS is_paused_key FROM pgoutbox.message_view AS m
                WHERE m.queue = n.queue AND m.lane = l.number AND m.state = 'pending'
                    AND m.ordering_key IS NULL
                    AND m.available_at <= now()
                    AND NOT (
                        kind.leaves_out_paused AND m.topic IN (SELECT p.topic FROM pgoutbox.topic_pause_view AS p)
                    )
                ORDER BY m.available_at LIMIT 1
            ) AS first
            UNION ALL
            -- The first one of those that wait for the turn of their fair key.
            SELECT
                first.topic,
                first.available_at,
                coalesce(own.max_in_flight, common.max_in_flight) IS NOT DISTINCT FROM 0
            FROM (
                SELECT m.topic, m.available_at, m.fair_key FROM pgoutbox.message_view AS m
                WHERE m.queue = n.queue AND m.lane = 2 AND m.state = 'pending'
                    AND m.ordering_key IS NULL
                    AND m.available_at <= now()
                    AND NOT kind.leaves_out_paused
                ORDER BY m.available_at LIMIT 1
            ) AS first
            LEFT JOIN pgoutbox.fair_share_view AS own ON own.queue = n.queue AND own.fair_key = first.fair_key
            LEFT JOIN pgoutbox.fair_share_view AS common ON common.queue = n.queue AND common.fair_key = ''
            UNION ALL
            -- Key by key: the backlog of a paused key may be large.
            SELECT first.topic, first.available_at, false
            FROM (
                WITH RECURSIVE visited(key, number) AS (
                    SELECT '' COLLATE "C", 0
                    WHERE kind.leaves_out_paused
                    UNION ALL
                    SELECT next.key, v.number + 1
                    FROM visited AS v
                    CROSS JOIN LATERAL (
                        SELECT m.fair_key AS key FROM pgoutbox.message_view AS m
                        WHERE m.queue = n.queue AND m.lane = 2 AND m.state IN ('pending', 'sending')
                            AND m.fair_key > v.key
                        ORDER BY m.fair_key LIMIT 1
                    ) AS next
                    WHERE v.number < 10000
                )
                SELECT v.key FROM visited AS v WHERE v.number > 0
            ) AS waits
            LEFT JOIN pgoutbox.fair_share_view AS own ON own.queue = n.queue AND own.fair_key = waits.key
            LEFT JOIN pgoutbox.fair_share_view AS common ON common.queue = n.queue AND common.fair_key = ''
            CROSS JOIN LATERAL (
                SELECT m.topic, m.available_at FROM pgoutbox.message_view AS m
                WHERE m.queue = n.queue AND m.fair_key = waits.key AND m.lane = 2 AND m.state IN ('pending', 'sending')
                    AND m.available_at <= now()
                    AND m.topic NOT IN (SELECT p.topic FROM pgoutbox.topic_pause_view AS p)
                ORDER BY m.available_at LIMIT 1
            ) AS first
            WHERE coalesce(own.max_in_flight, common.max_in_flight) IS DISTINCT FROM 0
            UNION ALL
            (
                SELECT m.topic, m.available_at, false FROM pgoutbox.message_view AS m
                WHERE m.queue = n.queue AND m.ordering_key IS NOT NULL AND m.state = 'pending'
                    AND m.available_at <= now()
                    -- Always true: it permits the index message_live_ordered_due.
                    AND m.available_at > '-infinity'
                    AND NOT (
                        kind.leaves_out_paused AND m.topic IN (SELECT p.topic FROM pgoutbox.topic_pause_view AS p)
                    )
                ORDER BY m.available_at LIMIT 1
            )
        ) AS lane
        -- Without a pause, one read of each lane says all.
        WHERE NOT kind.leaves_out_paused OR EXISTS (SELECT FROM pgoutbox.topic_pause_view)
            OR EXISTS (SELECT FROM pgoutbox.fair_share_view AS s WHERE s.queue = n.queue AND s.max_in_flight = 0)
    ) AS one
    GROUP BY n.queue, one.is_paused
), ranked AS (
    SELECT w.queue, w.is_paused, w.seconds, row_number() OVER (ORDER BY w.seconds DESC, w.queue) AS place
    FROM waiting AS w
)
SELECT
    CASE WHEN r.place <= %(max_label_values)s::bigint THEN r.queue ELSE %(other)s::text END AS queue,
    r.is_paused::text AS paused,
    max(r.seconds) AS seconds
FROM ranked AS r
GROUP BY 1, 2
ORDER BY 1, 2
