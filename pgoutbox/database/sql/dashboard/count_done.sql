-- The number of sent, skipped and cancelled messages, counted up to `cap` together.
SELECT done.state, count(*)
FROM (
    SELECT m.state
    FROM pgoutbox.message_view AS m
    WHERE m.state IN ('sent', 'skipped', 'cancelled')
    LIMIT %(cap)s::bigint
) AS done
GROUP BY done.state
