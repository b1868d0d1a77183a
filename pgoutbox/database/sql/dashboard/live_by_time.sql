-- The live messages of a queue by time of enqueue, those before `since` together; up to `cap` of each lane.
SELECT
    greatest(date_bin(make_interval(secs => %(width)s::float8), live.created_at, 'epoch'), %(since)s::timestamptz)
        AS created_slot,
    count(*) AS messages
FROM (
    SELECT found.created_at
    FROM (VALUES (0), (1), (2)) AS lane(number)
    CROSS JOIN LATERAL (
        SELECT m.created_at FROM pgoutbox.message_view AS m
        WHERE m.queue = %(queue)s::text AND m.lane = lane.number AND m.state IN ('pending', 'sending')
            AND m.ordering_key IS NULL
        ORDER BY m.available_at LIMIT %(cap)s::bigint
    ) AS found
    UNION ALL
    (
        SELECT m.created_at FROM pgoutbox.message_view AS m
        WHERE m.queue = %(queue)s::text AND m.ordering_key IS NOT NULL AND m.available_at > '-infinity'
            AND m.state IN ('pending', 'sending')
        ORDER BY m.available_at LIMIT %(cap)s::bigint
    )
) AS live
GROUP BY 1
