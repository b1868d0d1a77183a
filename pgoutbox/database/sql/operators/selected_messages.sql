-- The messages of one selection by ids, owner or destination, and those for hooks about their failures: id, state, and
-- redacted destination.
SELECT m.id, m.state, m.address
FROM pgoutbox._selected_messages(%(ids)s::bigint[], %(owner)s::text, %(destination)s::text, true) AS m
ORDER BY m.id
