-- By state, among the next `rows` rows before `before_id`: the number of messages that match the filter, the newest `limit`
-- of them, or all if it is null, the number of rows read, and the last of them. A filter with few matches must not read
-- millions of rows, so the innermost limit applies to the rows read.
SELECT
    looked_at.state,
    count(*) FILTER (WHERE looked_at.matches) AS matching,
    (array_agg(looked_at.id ORDER BY looked_at.id DESC) FILTER (WHERE looked_at.matches))[
        :coalesce(%(limit)s::bigint, %(rows)s::bigint)
    ] AS ids,
    count(*) AS row_count,
    min(looked_at.id) AS last_id
FROM (
    SELECT
        m.id,
        m.state,
        \ir ../operators/_matches.sql
        AS matches
    FROM (
        -- Only conditions that select whole partitions or few ids: with others the limit would not bound the rows read.
        SELECT near.*
        FROM pgoutbox.message_view AS near
        WHERE (%(partition_states)s::text[] IS NULL OR near.state = ANY (%(partition_states)s::text[]))
            AND (%(ids)s::bigint[] IS NULL OR near.id = ANY (%(ids)s::bigint[]))
            AND (%(before_id)s::bigint IS NULL OR near.id < %(before_id)s::bigint)
            AND (%(not_below_id)s::bigint IS NULL OR near.id >= %(not_below_id)s::bigint)
        ORDER BY near.id DESC
        LIMIT %(rows)s::bigint
    ) AS m
) AS looked_at
GROUP BY looked_at.state
