-- A sample of the pending payloads of these topics, to compare with their models: up to `cap` of the oldest and of the
-- newest in the sample of each topic. It reads a bounded number of rows of each queue, those that are claimed next and the
-- newest, so that a backlog of one queue hides no other. Large payloads are left out. Null `served` means all queues.
\ir ../dashboard/_live_queue_names.sql
, sampled AS (
    SELECT near.id, near.topic
    FROM named AS n
    CROSS JOIN LATERAL (
        SELECT first.*
        FROM (VALUES (0), (1), (2)) AS lane(number)
        CROSS JOIN LATERAL (
            SELECT m.id, m.topic FROM pgoutbox.message_live AS m
            WHERE m.queue = n.queue AND m.lane = lane.number AND m.state = 'pending' AND m.ordering_key IS NULL
            ORDER BY m.available_at, m.id LIMIT 100
        ) AS first
        UNION
        SELECT last.*
        FROM (VALUES (0), (2)) AS lane(number)
        CROSS JOIN LATERAL (
            SELECT m.id, m.topic FROM pgoutbox.message_live AS m
            WHERE m.queue = n.queue AND m.lane = lane.number AND m.state = 'pending' AND m.ordering_key IS NULL
            ORDER BY m.available_at DESC, m.id DESC LIMIT 100
        ) AS last
        UNION
        (
            SELECT m.id, m.topic FROM pgoutbox.message_live AS m
            WHERE m.queue = n.queue AND m.ordering_key IS NOT NULL AND m.state = 'pending'
            ORDER BY m.ordering_key, m.id LIMIT 100
        )
    ) AS near
    WHERE (%(served)s::text[] IS NULL OR n.queue = ANY (%(served)s::text[]))
        AND near.topic = ANY (%(topics)s::text[])
), ranked AS (
    SELECT
        s.id,
        row_number() OVER (PARTITION BY s.topic ORDER BY s.id) AS from_oldest,
        row_number() OVER (PARTITION BY s.topic ORDER BY s.id DESC) AS from_newest
    FROM sampled AS s
)
SELECT m.topic, m.destination, m.coalesce_key, m.ordering_key, m.payload::text AS payload, m.payload_version
FROM ranked AS r
JOIN pgoutbox.message_live AS m ON m.id = r.id
WHERE least(r.from_oldest, r.from_newest) <= %(cap)s::bigint AND pg_column_size(m.payload) <= 100000
ORDER BY m.topic, m.id
