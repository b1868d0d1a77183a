-- The starts and the ends of workers in the last two weeks. A worker that no longer reports is `lost`: it was killed, is
-- suspended, or does not reach the database.
CREATE VIEW pgoutbox.worker_event_view AS
SELECT
    w.name,
    e.event,
    e.at,
    w.version,
    w.queues
FROM pgoutbox.worker AS w
CROSS JOIN LATERAL (
    VALUES
        ('started', w.started_at),
        ('stopped', coalesce(w.stopped_at, w.ended_at)),
        ('lost', CASE
            WHEN coalesce(w.stopped_at, w.ended_at) IS NULL AND w.seen_at <= now() - interval '3 minutes'
                THEN w.seen_at
        END)
) AS e(event, at)
WHERE e.at IS NOT NULL;
