-- The numbers of pending messages that are due, that are due later, and that have failed an attempt, for the given `parts`: each
-- among the first `cap` messages of its part, queue by queue. They are all there are if `is_all`.
\ir _live_queue_names.sql
SELECT
    part.name,
    count(message.has_failed) FILTER (WHERE part.name <> 'again' OR message.has_failed) AS messages,
    count(message.has_failed) < %(cap)s::bigint
        AND (SELECT count(*) FROM named) < %(queues)s::bigint AS is_all
FROM (
    VALUES ('now', true, '-infinity'::timestamptz, now()),
        ('later', true, now(), 'infinity'),
        ('again', false, '-infinity', 'infinity')
) AS part(name, has_fresh, after_at, until_at)
LEFT JOIN LATERAL (
    -- The walks along the names end with the limit, too.
    SELECT lane.has_failed
    FROM plain AS n
    CROSS JOIN LATERAL (
        (
            SELECT false AS has_failed FROM pgoutbox.message_view AS m
            WHERE m.queue = n.queue AND m.lane = 0 AND m.state = 'pending' AND m.ordering_key IS NULL
                AND m.available_at > part.after_at AND m.available_at <= part.until_at AND part.has_fresh
            ORDER BY m.available_at LIMIT %(cap)s::bigint
        )
        UNION ALL
        -- Attempts without snoozes, releases and postponements, which raise max_attempts.
        SELECT attempted.has_failed
        FROM (VALUES (1), (2)) AS l(number)
        CROSS JOIN LATERAL (
            SELECT m.attempt_count + m.attempt_budget > m.max_attempts AS has_failed FROM pgoutbox.message_view AS m
            WHERE m.queue = n.queue AND m.lane = l.number AND m.state = 'pending' AND m.ordering_key IS NULL
                AND m.available_at > part.after_at AND m.available_at <= part.until_at
            ORDER BY m.available_at LIMIT %(cap)s::bigint
        ) AS attempted
    ) AS lane
    UNION ALL
    SELECT lane.has_failed
    FROM ordered AS n
    CROSS JOIN LATERAL (
        SELECT m.attempt_count + m.attempt_budget > m.max_attempts AS has_failed FROM pgoutbox.message_view AS m
        WHERE m.queue = n.queue AND m.ordering_key IS NOT NULL AND m.state = 'pending'
            AND m.available_at > part.after_at AND m.available_at <= part.until_at
            -- Always true: it permits the index message_live_ordered_due.
            AND m.available_at > '-infinity'
        ORDER BY m.available_at LIMIT %(cap)s::bigint
    ) AS lane
    LIMIT %(cap)s::bigint
) AS message ON true
WHERE part.name = ANY (%(parts)s::text[])
GROUP BY part.name
