-- The number of pending, in-flight and failed messages, each counted up to `cap`.
SELECT
    (
        SELECT count(*)
        FROM (
            SELECT FROM pgoutbox.message_view AS m WHERE m.state = 'pending' LIMIT %(cap)s::bigint
        ) AS pending
    ) AS pending,
    (
        SELECT count(*)
        FROM (
            SELECT FROM pgoutbox.in_flight_view AS v LIMIT %(cap)s::bigint
        ) AS sending
    ) AS sending,
    (
        SELECT count(*)
        FROM (SELECT FROM pgoutbox.message_view AS m WHERE m.state = 'failed' LIMIT %(cap)s::bigint) AS failed
    ) AS failed
