-- One page of the messages that match the filter, newest first: up to `limit` of the next `rows` rows before
-- `before_id`. A filter with few matches must not read millions of rows, so the innermost limit applies to the rows
-- read.
SELECT
    \ir ../operators/_listed.sql
FROM (
    SELECT m.id, m.state
    FROM (
        SELECT near.*
        \ir _before.sql
        LIMIT %(rows)s::bigint
    ) AS m
    WHERE
        \ir ../operators/_matches.sql
    ORDER BY m.id DESC
    LIMIT %(limit)s::bigint
) AS found
\ir _read_again.sql
