-- The messages before `before_id`, newest first. Only conditions that select whole partitions or few ids are allowed
-- here: with others the limit of the including statement would not bound the rows read.
FROM pgoutbox.message_view AS near
WHERE (%(partition_states)s::text[] IS NULL OR near.state = ANY (%(partition_states)s::text[]))
    AND (%(ids)s::bigint[] IS NULL OR near.id = ANY (%(ids)s::bigint[]))
    AND (%(before_id)s::bigint IS NULL OR near.id < %(before_id)s::bigint)
    AND (%(not_below_id)s::bigint IS NULL OR near.id >= %(not_below_id)s::bigint)
ORDER BY near.id DESC
