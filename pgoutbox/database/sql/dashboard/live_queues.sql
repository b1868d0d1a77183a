-- The queues with live messages and queues with limits or a pause; or the given queue. Due and scheduled messages are
-- counted lane by lane up to `cap`. The first message of each lane is its oldest.
-- The first four CTEs find the names of queues, lane by lane. Each leaps along an index from one name to the next,
-- because DISTINCT would read every message.
WITH RECURSIVE fresh(queue) AS (
    (
        SELECT m.queue
        FROM pgoutbox.message_view AS m
        WHERE m.state = 'pending' AND m.attempt_count = 0 AND m.ordering_key IS NULL
        ORDER BY m.queue
        LIMIT 1
    )
    UNION ALL
    SELECT (
        SELECT m.queue
        FROM pgoutbox.message_view AS m
        WHERE m.state = 'pending' AND m.attempt_count = 0 AND m.ordering_key IS NULL AND m.queue > f.queue
        ORDER BY m.queue
        LIMIT 1
    )
    FROM fresh AS f
    WHERE f.queue IS NOT NULL
), retried(queue) AS (
    (
        SELECT m.queue
        FROM pgoutbox.message_view AS m
        WHERE m.attempt_count > 0 AND m.state = 'pending' AND m.ordering_key IS NULL
        ORDER BY m.queue
        LIMIT 1
    )
    UNION ALL
    SELECT (
        SELECT m.queue
        FROM pgoutbox.message_view AS m
        WHERE m.attempt_count > 0 AND m.state = 'pending' AND m.ordering_key IS NULL AND m.queue > r.queue
        ORDER BY m.queue
        LIMIT 1
    )
    FROM retried AS r
    WHERE r.queue IS NOT NULL
), ordered(queue) AS (
    (
        SELECT m.queue
        FROM pgoutbox.message_view AS m
        WHERE m.ordering_key IS NOT NULL AND m.state = 'pending'
        ORDER BY m.queue
        LIMIT 1
    )
    UNION ALL
    SELECT (
        SELECT m.queue
        FROM pgoutbox.message_view AS m
        WHERE m.ordering_key IS NOT NULL AND m.state = 'pending' AND m.queue > o.queue
        ORDER BY m.queue
        LIMIT 1
    )
    FROM ordered AS o
    WHERE o.queue IS NOT NULL
), leased(queue) AS (
    (
        SELECT m.queue
        FROM pgoutbox.message_view AS m
        WHERE m.state = 'sending' AND m.lease_expires_at IS NOT NULL
        ORDER BY m.queue
        LIMIT 1
    )
    UNION ALL
    SELECT (
        SELECT m.queue
        FROM pgoutbox.message_view AS m
        WHERE m.state = 'sending' AND m.lease_expires_at IS NOT NULL AND m.queue > l.queue
        ORDER BY m.queue
        LIMIT 1
    )
    FROM leased AS l
    WHERE l.queue IS NOT NULL
), named AS (
    SELECT asked.queue
    FROM (VALUES (%(queue)s::text)) AS asked(queue)
    WHERE asked.queue IS NOT NULL
    UNION ALL
    SELECT queue
    FROM (
        (SELECT f.queue FROM fresh AS f LIMIT %(queues)s::bigint)
        UNION
        (SELECT r.queue FROM retried AS r LIMIT %(queues)s::bigint)
        UNION
        (SELECT o.queue FROM ordered AS o LIMIT %(queues)s::bigint)
        UNION
        (SELECT l.queue FROM leased AS l LIMIT %(queues)s::bigint)
        UNION
        (SELECT q.name FROM pgoutbox.queue_view AS q ORDER BY q.name LIMIT %(queues)s::bigint)
    ) AS found
    WHERE queue IS NOT NULL AND %(queue)s::text IS NULL
    ORDER BY queue
    LIMIT %(queues)s::bigint
)
SELECT
    n.queue,
    (
        SELECT count(*)
        FROM (
            (
                SELECT
                FROM pgoutbox.message_view AS m
                WHERE m.queue = n.queue
                    AND m.attempt_count = 0
                    AND m.state = 'pending'
                    AND m.ordering_key IS NULL
                    AND m.available_at <= now()
                ORDER BY m.available_at
                LIMIT %(cap)s::bigint
            )
            UNION ALL
            (
                SELECT
                FROM pgoutbox.message_view AS m
                WHERE m.queue = n.queue
                    AND m.attempt_count > 0
                    AND m.state = 'pending'
                    AND m.ordering_key IS NULL
                    AND m.available_at <= now()
                ORDER BY m.available_at
                LIMIT %(cap)s::bigint
            )
            UNION ALL
            (
                SELECT
                FROM pgoutbox.message_view AS m
                WHERE m.queue = n.queue
                    AND m.ordering_key IS NOT NULL
                    AND m.state = 'pending'
                    AND m.available_at <= now()
                ORDER BY m.available_at
                LIMIT %(cap)s::bigint
            )
        ) AS due
    ) AS due,
    (
        SELECT count(*)
        FROM (
            (
                SELECT
                FROM pgoutbox.message_view AS m
                WHERE m.queue = n.queue
                    AND m.attempt_count = 0
                    AND m.state = 'pending'
                    AND m.ordering_key IS NULL
                    AND m.available_at > now()
                ORDER BY m.available_at
                LIMIT %(cap)s::bigint
            )
            UNION ALL
            (
                SELECT
                FROM pgoutbox.message_view AS m
                WHERE m.queue = n.queue
                    AND m.attempt_count > 0
                    AND m.state = 'pending'
                    AND m.ordering_key IS NULL
                    AND m.available_at > now()
                ORDER BY m.available_at
                LIMIT %(cap)s::bigint
            )
            UNION ALL
            (
                SELECT
                FROM pgoutbox.message_view AS m
                WHERE m.queue = n.queue
                    AND m.ordering_key IS NOT NULL
                    AND m.state = 'pending'
                    AND m.available_at > now()
                ORDER BY m.available_at
                LIMIT %(cap)s::bigint
            )
        ) AS scheduled
    ) AS scheduled,
    (
        SELECT count(*)
        FROM (
            SELECT
            FROM pgoutbox.message_view AS m
            WHERE m.queue = n.queue AND m.state = 'sending' AND m.lease_expires_at > now()
            LIMIT %(cap)s::bigint
        ) AS held
    ) AS sending,
    (
        SELECT count(*)
        FROM (
            SELECT
            FROM pgoutbox.message_view AS m
            WHERE m.queue = n.queue AND m.state = 'sending' AND m.lease_expires_at <= now()
            LIMIT %(cap)s::bigint
        ) AS lapsed
    ) AS lapsed,
    (
        SELECT min(first.available_at)
        FROM (
            (
                SELECT m.available_at
                FROM pgoutbox.message_view AS m
                WHERE m.queue = n.queue
                    AND m.attempt_count = 0
                    AND m.state = 'pending'
                    AND m.ordering_key IS NULL
                ORDER BY m.available_at
                LIMIT 1
            )
            UNION ALL
            (
                SELECT m.available_at
                FROM pgoutbox.message_view AS m
                WHERE m.queue = n.queue
                    AND m.attempt_count > 0
                    AND m.state = 'pending'
                    AND m.ordering_key IS NULL
                ORDER BY m.available_at
                LIMIT 1
            )
            UNION ALL
            (
                SELECT m.available_at
                FROM pgoutbox.message_view AS m
                WHERE m.queue = n.queue AND m.ordering_key IS NOT NULL AND m.state = 'pending'
                ORDER BY m.available_at
                LIMIT 1
            )
        ) AS first
    ) AS next_due_at,
    CASE WHEN q.is_paused THEN q.paused_at END AS paused_at,
    q.resume_at,
    q.rate_count,
    q.rate_seconds,
    q.burst,
    q.tokens,
    q.max_in_flight
FROM named AS n
LEFT JOIN pgoutbox.queue_view AS q ON q.name = n.queue
ORDER BY n.queue
