-- The number of messages that a drain waits for: in flight, due, or waiting for a retry. It does not wait for scheduled
-- messages that were never attempted, nor for messages that cannot begin.
SELECT count(*)
FROM pgoutbox.message_live AS m
WHERE m.queue = ANY (%(queues)s::text[])
    AND pgoutbox._handled_as(m.topic, m.payload_version) = ANY (%(topics)s::text[])
    AND m.topic NOT IN (SELECT p.topic FROM pgoutbox.topic_pause_view AS p)
    AND (m.attempt_count > 0 OR m.available_at <= now())
    -- A failed message halts its ordering key.
    AND NOT EXISTS (
        SELECT
        FROM pgoutbox.message_failed AS f
        WHERE f.queue = m.queue AND f.ordering_key = m.ordering_key AND f.halts_key AND f.id < m.id
    )
    AND NOT EXISTS (
        -- A message behind one of its ordering key that the drain does not wait for cannot begin either.
        SELECT
        FROM pgoutbox.message_live AS e
        WHERE e.queue = m.queue
            AND e.ordering_key = m.ordering_key
            AND e.id < m.id
            AND (
                pgoutbox._handled_as(e.topic, e.payload_version) <> ALL (%(topics)s::text[])
                OR e.topic IN (SELECT p.topic FROM pgoutbox.topic_pause_view AS p)
                OR (e.attempt_count = 0 AND e.available_at > now())
            )
    )
    AND m.queue <> ALL (ARRAY(SELECT q.name FROM pgoutbox.queue_view AS q WHERE q.is_paused))
