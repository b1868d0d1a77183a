-- The database that the schema belongs to, whether it is this one, and the messages that workers would send from here.
SELECT
    current_database() AS database_name,
    h.database_name AS home_name,
    h.deployment,
    coalesce(h.is_here, false) AS is_here,
    m.due,
    m.scheduled,
    m.in_flight
FROM (
    SELECT
        count(*) FILTER (WHERE v.state = 'pending' AND v.available_at <= now()) AS due,
        count(*) FILTER (WHERE v.state = 'pending' AND v.available_at > now()) AS scheduled,
        count(*) FILTER (WHERE v.state = 'sending') AS in_flight
    FROM pgoutbox.message_view AS v
    WHERE v.state IN ('pending', 'sending')
) AS m
LEFT JOIN pgoutbox.home_view AS h ON true
