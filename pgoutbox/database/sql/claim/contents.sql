-- The shared contents of fan-outs, as JSON texts. As in claim.sql, null for one of more than 16 kB.
SELECT c.id, CASE WHEN octet_length(c.body) <= 16384 THEN c.body END
FROM (
    SELECT c.id, CASE WHEN pg_column_size(c.body) <= 16384 THEN c.body::text END
    FROM pgoutbox.content AS c
    WHERE c.id = ANY (%(ids)s::bigint[])
    OFFSET 0
) AS c(id, body)
