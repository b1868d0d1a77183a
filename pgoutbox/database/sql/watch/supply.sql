-- The due messages of a queue or a topic, up to `cap`, and whether a running worker serves it. Null for 25 hours after a run
-- of `worker --once` that served it: nobody knows whether there is a next one.
WITH serving AS MATERIALIZED (
    SELECT w.ended_at
    FROM pgoutbox.worker_view AS w
    WHERE (%(queue)s::text IS NULL OR %(queue)s::text = ANY (w.queues))
        AND (%(topic)s::text IS NULL OR %(topic)s::text = ANY (w.topics))
)
SELECT
    (
        SELECT count(*)
        FROM (
            SELECT
            FROM pgoutbox.message_view AS m
            WHERE m.state = 'pending' AND m.available_at <= now()
                AND (%(queue)s::text IS NULL OR m.queue = %(queue)s::text)
                AND (%(topic)s::text IS NULL OR m.topic = %(topic)s::text)
            LIMIT %(cap)s::bigint
        ) AS due
    ) AS due,
    CASE
        WHEN EXISTS (SELECT FROM serving AS s WHERE s.ended_at IS NULL) THEN true
        WHEN NOT EXISTS (SELECT FROM serving AS s WHERE s.ended_at > now() - interval '25 hours') THEN false
    END AS is_served
