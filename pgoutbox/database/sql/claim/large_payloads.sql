-- Payloads that a claim has left out, as JSON texts.
SELECT m.id, coalesce(m.payload, (SELECT l.body FROM pgoutbox.large_payload AS l WHERE l.message_id = m.id))::text
FROM pgoutbox.message_live AS m
WHERE m.id = ANY (%(ids)s::bigint[])
