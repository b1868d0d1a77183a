-- The number of messages that match the filter, and the number of rows read, among the next `rows` rows. The innermost
-- query is that of search_messages.sql.
SELECT count(*) FILTER (
    WHERE
        \ir ../operators/_matches.sql
), count(*)
FROM (
    SELECT near.*
    \ir _before.sql
    LIMIT %(rows)s::bigint
) AS m
