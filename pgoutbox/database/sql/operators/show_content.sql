-- The content that the messages of a fan-out share. As text, because Python does not read all JSON that PostgreSQL reads.
SELECT left(as_text.body, %(characters)s::integer) AS content, octet_length(as_text.body) AS content_bytes
FROM pgoutbox.content AS c
-- With OFFSET 0 the text is only computed once.
CROSS JOIN LATERAL (SELECT c.body::text AS body OFFSET 0) AS as_text
WHERE c.id = %(id)s::bigint
