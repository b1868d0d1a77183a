-- One page of the messages that match the filter, newest first: up to `limit` of the next `rows` rows before
-- `before_id`. A filter with few matches must not read millions of rows, so the innermost limit applies to the rows
-- read. The innermost query has only the conditions that select whole partitions; with others its limit would not bound
-- the rows read.
SELECT
    \ir ../operators/_listed.sql
FROM (
    SELECT m.id, m.state
    FROM (
        SELECT near.*
        FROM pgoutbox.message_view AS near
        WHERE (%(partition_states)s::text[] IS NULL OR near.state = ANY (%(partition_states)s::text[]))
            AND (%(before_id)s::bigint IS NULL OR near.id < %(before_id)s::bigint)
            AND (%(not_below_id)s::bigint IS NULL OR near.id >= %(not_below_id)s::bigint)
        ORDER BY near.id DESC
        LIMIT %(rows)s::bigint
    ) AS m
    WHERE
        \ir _matches_error_group.sql
    ORDER BY m.id DESC
    LIMIT %(limit)s::bigint
) AS found
-- The view redacts the columns of a list. A page has few of the rows read, so only these are read again through the
-- view.
CROSS JOIN LATERAL (
    SELECT listed.*
    FROM pgoutbox.message_view AS listed
    WHERE listed.id = found.id AND listed.state = found.state
    LIMIT 1
) AS m
ORDER BY m.id DESC
