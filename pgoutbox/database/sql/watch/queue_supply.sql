-- The due messages of a queue, up to `cap`, and whether a running worker serves it. Null for 25 hours after a run of
-- `worker --once` that served it: nobody knows whether there is a next one.
SELECT
    (
        SELECT count(*)
        FROM (
            SELECT
            FROM pgoutbox.message_view AS m
            WHERE m.state = 'pending' AND m.queue = %(queue)s::text AND m.available_at <= now()
            LIMIT %(cap)s::bigint
        ) AS due
    ) AS due,
    CASE
        WHEN EXISTS (
            SELECT FROM pgoutbox.worker_view AS w WHERE w.ended_at IS NULL AND %(queue)s::text = ANY (w.queues)
        ) THEN true
        WHEN NOT EXISTS (
            SELECT
            FROM pgoutbox.worker_view AS w
            WHERE w.ended_at > now() - interval '25 hours' AND %(queue)s::text = ANY (w.queues)
        ) THEN false
    END AS is_served
