-- Enqueue each of `alerts` to each destination. Its keys name the destination, so that each destination gets its own.
-- Without a destination, the application's own handler sends it.
SELECT count(*) FILTER (WHERE NOT e.duplicate) AS alert_count
FROM pgoutbox.enqueue_many((
    SELECT coalesce(
        jsonb_agg(
            jsonb_build_object(
                'topic', 'pgoutbox.alert',
                'payload', a.payload,
                'queue', %(alert_queue)s::text,
                'destination', d.destination,
                'coalesce_key', a.coalesce_key || ' ' || left(md5(coalesce(d.destination, '')), 8),
                'dedupe_key', a.dedupe_key || ' ' || left(md5(coalesce(d.destination, '')), 8),
                'on_duplicate', CASE WHEN a.dedupe_key IS NOT NULL THEN 'ignore' END
            )
        ),
        '[]'
    )
    FROM alerts AS a
    CROSS JOIN unnest(%(alert_destinations)s::text[]) AS d(destination)
    WHERE %(alert_queue)s::text IS NOT NULL
)) AS e
