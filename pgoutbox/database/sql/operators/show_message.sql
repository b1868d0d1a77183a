-- One message with its payload, for roles that may read payloads.
SELECT
    \ir _shown.sql
FROM pgoutbox.message AS m
LEFT JOIN pgoutbox.large_payload AS large ON large.message_id = m.id
-- As text, because Python does not read all JSON that PostgreSQL reads. With OFFSET 0 the text is only computed once.
CROSS JOIN LATERAL (
    SELECT m.headers::text AS headers, coalesce(m.payload, large.body)::text AS payload OFFSET 0
) AS as_text
WHERE m.id = %(id)s::bigint
