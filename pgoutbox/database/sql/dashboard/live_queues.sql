-- The given queues, in this order. Messages are counted lane by lane up to `cap`: fresh ones, retries, those that
-- wait for their turn, those with an ordering key, and those in flight.
SELECT
    n.queue,
    counted.due,
    counted.scheduled,
    counted.sending,
    counted.lapsed,
    counted.next_due_at,
    CASE WHEN q.is_paused THEN q.paused_at END AS paused_at,
    q.resume_at,
    q.rate_count,
    q.rate_seconds,
    q.burst,
    q.tokens,
    q.max_in_flight,
    q.ceiling_count,
    q.ceiling_seconds,
    (
        SELECT count(*) FROM pgoutbox.worker_view AS w WHERE w.ended_at IS NULL AND n.queue = ANY (w.queues)
    ) AS serving_count
FROM unnest(%(queues)s::text[]) WITH ORDINALITY AS n(queue, place)
CROSS JOIN LATERAL (
    SELECT
        count(*) FILTER (WHERE NOT lane.is_leased AND span.is_past) AS due,
        count(*) FILTER (WHERE NOT lane.is_leased AND NOT span.is_past) AS scheduled,
        count(*) FILTER (WHERE lane.is_leased AND NOT span.is_past) AS sending,
        count(*) FILTER (WHERE lane.is_leased AND span.is_past) AS lapsed,
        min(lane.at) FILTER (WHERE NOT lane.is_leased) AS next_due_at
    FROM (VALUES (true, '-infinity', now()), (false, now(), 'infinity')) AS span(is_past, after_at, until_at)
    CROSS JOIN LATERAL (
        SELECT found.available_at, false
        FROM (VALUES (0), (1), (2)) AS l(number)
        CROSS JOIN LATERAL (
            SELECT m.available_at FROM pgoutbox.message_view AS m
            WHERE m.queue = n.queue AND m.lane = l.number AND m.state = 'pending' AND m.ordering_key IS NULL
                AND m.available_at > span.after_at AND m.available_at <= span.until_at
            ORDER BY m.available_at LIMIT %(cap)s::bigint
        ) AS found
        UNION ALL
        (
            SELECT m.available_at, false FROM pgoutbox.message_view AS m
            WHERE m.queue = n.queue AND m.ordering_key IS NOT NULL AND m.state = 'pending'
                AND m.available_at > span.after_at AND m.available_at <= span.until_at
                -- Always true: it permits the index message_live_ordered_due.
                AND m.available_at > '-infinity'
            ORDER BY m.available_at LIMIT %(cap)s::bigint
        )
        UNION ALL
        (
            SELECT m.lease_expires_at, true FROM pgoutbox.in_flight_view AS m
            WHERE m.queue = n.queue
                AND m.lease_expires_at > span.after_at AND m.lease_expires_at <= span.until_at
            ORDER BY m.lease_expires_at LIMIT %(cap)s::bigint
        )
    ) AS lane(at, is_leased)
) AS counted
LEFT JOIN pgoutbox.queue_view AS q ON q.name = n.queue
ORDER BY n.place
