-- Whether a worker or one of the newest messages has a topic that begins so. Only roles that read the views may ask.
SELECT EXISTS (
    SELECT
    FROM pgoutbox.worker_view AS w
    CROSS JOIN LATERAL unnest(w.topics) AS t(topic)
    WHERE starts_with(t.topic, %(prefix)s::text)
) OR EXISTS (
    SELECT
    FROM (SELECT m.topic FROM pgoutbox.message_view AS m ORDER BY m.id DESC LIMIT 10000) AS newest
    WHERE starts_with(newest.topic, %(prefix)s::text)
)
