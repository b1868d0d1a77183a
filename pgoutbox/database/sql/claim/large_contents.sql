-- Shared contents of fan-outs that contents.sql has left out, as JSON texts.
SELECT c.id, c.body::text
FROM pgoutbox.content AS c
WHERE c.id = ANY (%(ids)s::bigint[])
