-- The next matches for a bulk: from the oldest message on, `rows` rows at a time, up to `through_id`, the newest
-- message at its start. One row: the matches, the last id read, and the number of rows read.
SELECT
    array_agg(looked_at.id ORDER BY looked_at.id) FILTER (WHERE looked_at.matches) AS ids,
    array_agg(looked_at.attempt_count ORDER BY looked_at.id) FILTER (WHERE looked_at.matches) AS attempt_counts,
    max(looked_at.id) AS last_id,
    count(*) AS row_count
FROM (
    SELECT
        m.id,
        m.attempt_count,
        \ir ../operators/_matches.sql
        AS matches
    FROM (
        SELECT near.*
        FROM pgoutbox.message_view AS near
        WHERE (%(partition_states)s::text[] IS NULL OR near.state = ANY (%(partition_states)s::text[]))
            -- Selected messages are few: without this condition their search would read the whole table.
            AND (%(ids)s::bigint[] IS NULL OR near.id = ANY (%(ids)s::bigint[]))
            AND near.id > %(after_id)s::bigint
            AND near.id <= %(through_id)s::bigint
        ORDER BY near.id
        LIMIT %(rows)s::bigint
    ) AS m
) AS looked_at
