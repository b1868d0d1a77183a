-- The shared contents of fan-outs, as JSON texts.
SELECT c.id, c.body::text
FROM pgoutbox.content AS c
WHERE c.id = ANY (%(ids)s::bigint[])
