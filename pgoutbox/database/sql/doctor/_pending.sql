-- The pending messages of the queue `l` that fall due before `l.until_at`: the `l.rows` of each lane that are due first. The
-- lanes are those of a claim, and each has its own index.
(
    SELECT 0 AS part, m.id, m.topic, m.destination, m.ordering_key, m.attempt_count, m.available_at
    FROM pgoutbox.message_view AS m
    WHERE m.queue = l.queue AND m.lane = 0 AND m.state = 'pending' AND m.ordering_key IS NULL
        AND m.available_at < l.until_at
    ORDER BY m.available_at LIMIT l.rows
)
UNION ALL
(
    SELECT 1 AS part, m.id, m.topic, m.destination, m.ordering_key, m.attempt_count, m.available_at
    FROM pgoutbox.message_view AS m
    WHERE m.queue = l.queue AND m.lane = 1 AND m.state = 'pending' AND m.ordering_key IS NULL
        AND m.available_at < l.until_at
    ORDER BY m.available_at LIMIT l.rows
)
UNION ALL
(
    SELECT 2 AS part, m.id, m.topic, m.destination, m.ordering_key, m.attempt_count, m.available_at
    FROM pgoutbox.message_view AS m
    WHERE m.queue = l.queue AND m.ordering_key IS NOT NULL AND m.state = 'pending'
        AND m.available_at < l.until_at
        -- Always true: it permits the index message_live_ordered_due.
        AND m.available_at > '-infinity'
    ORDER BY m.available_at LIMIT l.rows
)
