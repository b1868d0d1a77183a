-- The number of messages that match the filter, counted up to `limit`.
SELECT count(*)
FROM (
    SELECT
    FROM pgoutbox.message_view AS m
    WHERE
        \ir _matches.sql
    LIMIT %(limit)s::bigint
) AS matching
