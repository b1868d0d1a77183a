-- Wait for the rows of messages in flight, and lock them. A transactional handler runs this before a statement that would
-- skip the rows.
SELECT FROM pgoutbox.message_live AS m
WHERE m.id = ANY (%(ids)s::bigint[]) AND m.state = 'sending'
ORDER BY m.id
FOR UPDATE
