-- The payload that a claim has left out, as a JSON text. No row if the attempt no longer holds its message.
SELECT m.payload::text
FROM pgoutbox.message_live AS m
WHERE m.id = %(id)s::bigint
    AND m.state = 'sending'
    AND m.attempt_count = %(attempt_count)s::integer
    AND m.worker = %(worker)s::text
