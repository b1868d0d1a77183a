-- All data of these messages. As text, because Python does not read all JSON that PostgreSQL reads.
SELECT e.message, e.headers::text AS headers, e.payload::text AS payload, e.content::text AS content
FROM pgoutbox.export(%(ids)s::bigint[]) AS e
