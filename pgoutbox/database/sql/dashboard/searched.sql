-- The last of the `rows` rows that search_messages.sql has read: after less than a page of matches, the next search
-- continues there. No row: it has read all rows. The conditions are those of its innermost query.
SELECT near.id
FROM pgoutbox.message_view AS near
WHERE (%(partition_states)s::text[] IS NULL OR near.state = ANY (%(partition_states)s::text[]))
    AND (%(before_id)s::bigint IS NULL OR near.id < %(before_id)s::bigint)
    AND (%(not_below_id)s::bigint IS NULL OR near.id >= %(not_below_id)s::bigint)
ORDER BY near.id DESC
OFFSET %(rows)s::bigint - 1
LIMIT 1
