-- The shared contents of fan-outs, as JSON texts. As in _returned.sql, null for one of more than 32 kB.
SELECT c.id, CASE WHEN octet_length(c.body) <= 32768 THEN c.body END
FROM (SELECT c.id, c.body::text FROM pgoutbox.content AS c WHERE c.id = ANY (%(ids)s::bigint[]) OFFSET 0) AS c(id, body)
