-- One page of the messages in flight that match the filter, newest first, like search_messages.sql. Few messages have
-- this state, and they have their own index.
SELECT
    \ir ../operators/_listed.sql
FROM (
    SELECT m.id, m.state
    FROM (
        SELECT held.*
        FROM pgoutbox.in_flight_view AS v
        JOIN pgoutbox.message_view AS held ON held.id = v.id AND held.state = 'sending'
        WHERE (%(before_id)s::bigint IS NULL OR held.id < %(before_id)s::bigint)
            AND (%(not_below_id)s::bigint IS NULL OR held.id >= %(not_below_id)s::bigint)
        LIMIT %(rows)s::bigint
    ) AS m
    WHERE
        \ir ../operators/_matches.sql
    ORDER BY m.id DESC
    LIMIT %(limit)s::bigint
) AS found
\ir _read_again.sql
