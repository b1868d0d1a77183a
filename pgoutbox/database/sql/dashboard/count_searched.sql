-- By state, among the next `rows` rows: the number of messages that match the filter, the newest of them, the number of rows
-- read, and the last of them. The innermost query is that of search_messages.sql.
SELECT
    looked_at.state,
    count(*) FILTER (WHERE looked_at.matches) AS matching,
    max(looked_at.id) FILTER (WHERE looked_at.matches) AS newest_id,
    count(*) AS row_count,
    min(looked_at.id) AS last_id
FROM (
    SELECT
        m.id,
        m.state,
        \ir ../operators/_matches.sql
        AS matches
    FROM (
        SELECT near.*
        \ir _before.sql
        LIMIT %(rows)s::bigint
    ) AS m
) AS looked_at
GROUP BY looked_at.state
