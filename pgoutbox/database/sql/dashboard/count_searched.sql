-- The number of messages that match the filter, and the number of rows read, among the next `rows` rows. The innermost
-- query is that of search_messages.sql.
SELECT count(*) FILTER (
    WHERE
        \ir _matches_error_group.sql
), count(*)
FROM (
    SELECT near.*
    FROM pgoutbox.message_view AS near
    WHERE (%(partition_states)s::text[] IS NULL OR near.state = ANY (%(partition_states)s::text[]))
        AND (%(before_id)s::bigint IS NULL OR near.id < %(before_id)s::bigint)
        AND (%(not_below_id)s::bigint IS NULL OR near.id >= %(not_below_id)s::bigint)
    ORDER BY near.id DESC
    LIMIT %(rows)s::bigint
) AS m
