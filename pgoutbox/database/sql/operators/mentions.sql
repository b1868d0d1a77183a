-- The rows that contain one of these texts, and the copies of these messages.
SELECT m.relation, m.field, m.id
FROM pgoutbox.mentions(%(texts)s::text[], %(copies_of)s::bigint[]) AS m
