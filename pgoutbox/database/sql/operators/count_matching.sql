-- The number of messages that match the filter, counted up to `limit`.
SELECT count(*)
FROM (
    SELECT
    FROM pgoutbox.message_view AS m
    WHERE
        \ir ../dashboard/_matches_error_group.sql
    LIMIT %(limit)s::bigint
) AS matching
