-- Wait for the row of a message in flight, and lock it. A transactional handler runs this before a statement that would
-- skip the row.
SELECT FROM pgoutbox.message_live AS m WHERE m.id = %(id)s::bigint AND m.state = 'sending' FOR UPDATE
