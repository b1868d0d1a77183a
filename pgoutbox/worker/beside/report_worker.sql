-- Report that this worker runs, delete the rows of workers of long ago, and return the problems that an operator
-- should know, in the order of `Trouble`: open breakers, and late messages of the `watched` queues that no running
-- worker claims. Every worker runs it before its first claim and then once a minute. It raises OB004 for a worker that has
-- become too old.
WITH reported AS (
    INSERT INTO pgoutbox.worker AS w (name, queues, topics, redirect_to, version, slots)
    SELECT
        %(worker)s::text, %(queues)s::text[], %(topics)s::text[], %(redirect_to)s::text, %(version)s::text,
        %(slots)s::integer
    FROM pgoutbox._require_package(%(version)s::text)
    ON CONFLICT ON CONSTRAINT worker_pkey DO UPDATE
    SET seen_at = now()
    RETURNING w.name
), gone AS (
    -- Deadlocks: a report first locks its own row. Then it skips the locked rows of others, and waits for none of them.
    DELETE FROM pgoutbox.worker AS w
    USING (
        SELECT o.name
        FROM pgoutbox.worker AS o
        CROSS JOIN reported AS r
        WHERE o.ended_at IS NULL
            AND o.name <> r.name
            AND (o.stopped_at IS NOT NULL OR o.seen_at <= now() - interval '3 minutes')
            AND (
                o.seen_at <= now() - interval '14 days'
                -- More have stopped than anybody reads.
                OR o.seen_at < (
                    SELECT n.seen_at
                    FROM pgoutbox.worker AS n
                    WHERE n.ended_at IS NULL
                    ORDER BY n.seen_at DESC
                    OFFSET 999
                    LIMIT 1
                )
            )
        ORDER BY o.name
        LIMIT 100
        FOR UPDATE OF o SKIP LOCKED
    ) AS old
    WHERE w.name = old.name
), running AS MATERIALIZED (
    SELECT v.queues, v.topics
    FROM pgoutbox.worker_view AS v
    WHERE v.ended_at IS NULL
    UNION ALL
    SELECT %(queues)s::text[], %(topics)s::text[]
), late AS (
    -- Only the oldest messages of each lane: behind a backlog, a message without a worker becomes one of them in time.
    SELECT watched.queue, m.topic, m.available_at
    FROM unnest(%(watched)s::text[]) AS watched(queue)
    CROSS JOIN LATERAL (
        SELECT found.*
        FROM (VALUES (0), (1), (2)) AS lane(number)
        CROSS JOIN LATERAL (
            SELECT pgoutbox._handled_as(f.topic, f.payload_version), f.available_at
            FROM pgoutbox.message_live AS f
            WHERE f.queue = watched.queue
                AND f.lane = lane.number
                AND f.state = 'pending'
                AND f.ordering_key IS NULL
                AND f.available_at < now() - make_interval(secs => %(late_seconds)s::float8)
            ORDER BY f.available_at, f.id
            LIMIT 1000
        ) AS found
        UNION ALL
        (
            SELECT pgoutbox._handled_as(o.topic, o.payload_version), o.available_at
            FROM pgoutbox.message_live AS o
            WHERE o.queue = watched.queue
                AND o.ordering_key IS NOT NULL
                AND o.state = 'pending'
                AND o.available_at < now() - make_interval(secs => %(late_seconds)s::float8)
                -- Always true: it permits the index message_live_ordered_due.
                AND o.available_at > '-infinity'
            ORDER BY o.available_at
            LIMIT 1000
        )
    ) AS m(topic, available_at)
), unclaimed AS (
    SELECT
        l.queue,
        l.topic,
        count(*) AS messages,
        min(l.available_at) AS since,
        EXISTS (SELECT FROM running AS u WHERE l.queue = ANY (u.queues)) AS is_served
    FROM late AS l
    GROUP BY l.queue, l.topic
    HAVING NOT EXISTS (
        SELECT FROM running AS u WHERE l.queue = ANY (u.queues) AND l.topic = ANY (u.topics)
    )
)
SELECT
    CASE WHEN bool_and(c.is_served) THEN 'handler' ELSE 'queue' END AS kind,
    c.queue AS name,
    array_agg(c.topic ORDER BY c.topic) AS topics,
    sum(c.messages)::bigint AS messages,
    extract(epoch FROM now() - min(c.since))::float8 AS seconds
FROM unclaimed AS c
GROUP BY c.queue
UNION ALL
(
    SELECT 'breaker', b.key, '{}', 0, extract(epoch FROM now() - b.opened_at)::float8
    FROM pgoutbox.breaker AS b
    ORDER BY b.opened_at, b.key
    LIMIT 20
)
