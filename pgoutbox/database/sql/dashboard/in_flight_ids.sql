-- The messages in flight, those of these ids or up to `rows` of all.
SELECT v.id
FROM pgoutbox.in_flight_view AS v
WHERE %(ids)s::bigint[] IS NULL OR v.id = ANY (%(ids)s::bigint[])
LIMIT %(rows)s::bigint
