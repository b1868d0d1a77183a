-- The payload that a claim has left out, as a JSON text. No row if the attempt no longer holds its message.
SELECT m.payload::text
FROM pgoutbox.message_live AS m
WHERE m.id = ANY (%(ids)s::bigint[])
    \ir ../finish/_fence.sql
