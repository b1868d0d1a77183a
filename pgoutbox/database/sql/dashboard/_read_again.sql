-- The view redacts the columns of a list. A page has few of the rows read, so only these are read again through the
-- view.
CROSS JOIN LATERAL (
    SELECT listed.*
    FROM pgoutbox.message_view AS listed
    WHERE listed.id = found.id AND listed.state = found.state
    LIMIT 1
) AS m
ORDER BY m.id DESC
