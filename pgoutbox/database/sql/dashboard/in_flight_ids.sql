-- The newest `rows` messages in flight, those of these ids or of all, from `not_below_id` to before `before_id`.
SELECT v.id
FROM pgoutbox.in_flight_view AS v
WHERE (%(ids)s::bigint[] IS NULL OR v.id = ANY (%(ids)s::bigint[]))
    AND (%(before_id)s::bigint IS NULL OR v.id < %(before_id)s::bigint)
    AND (%(not_below_id)s::bigint IS NULL OR v.id >= %(not_below_id)s::bigint)
ORDER BY v.id DESC
LIMIT %(rows)s::bigint
