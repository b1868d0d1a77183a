-- The undelivered messages of the queue `l`, those of each lane that are due first, with the time at which each was due
-- for the first time: a message that was attempted counts from its first attempt. `l.fresh_rows` of those that were
-- never attempted, and `l.rows` of the others. Those that wait for their turn are of both kinds.
(
    SELECT 0 AS part, m.id, m.available_at AS due_at
    FROM pgoutbox.message_view AS m
    WHERE m.queue = l.queue AND m.lane = 0 AND m.state = 'pending' AND m.ordering_key IS NULL
        AND m.available_at < l.until_at
    ORDER BY m.available_at LIMIT l.fresh_rows
)
UNION ALL
(
    SELECT 1, m.id, m.first_attempt_at
    FROM pgoutbox.message_view AS m
    WHERE m.queue = l.queue AND m.lane = 1 AND m.state IN ('pending', 'sending') AND m.ordering_key IS NULL
    ORDER BY m.available_at LIMIT l.rows
)
UNION ALL
(
    SELECT 2, m.id, CASE WHEN m.attempt_count = 0 THEN m.available_at ELSE m.first_attempt_at END
    FROM pgoutbox.message_view AS m
    WHERE m.queue = l.queue AND m.lane = 2 AND m.state = 'pending' AND m.ordering_key IS NULL
    ORDER BY m.available_at LIMIT l.rows
)
UNION ALL
(
    SELECT 3, m.id, CASE WHEN m.lane = 0 THEN m.available_at ELSE m.first_attempt_at END
    FROM pgoutbox.message_view AS m
    WHERE m.queue = l.queue AND m.ordering_key IS NOT NULL AND m.state IN ('pending', 'sending')
        -- Always true: it permits the index message_live_ordered_due.
        AND m.available_at > '-infinity'
    ORDER BY m.available_at LIMIT l.rows
)
