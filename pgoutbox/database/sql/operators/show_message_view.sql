-- One message with the structure of its payload, for roles that may not read payloads.
SELECT
    \ir _shown.sql
FROM pgoutbox.message_view AS m
-- As text, because Python does not read all JSON that PostgreSQL reads. With OFFSET 0 the text is only computed once.
CROSS JOIN LATERAL (SELECT m.headers::text AS headers, m.payload::text AS payload OFFSET 0) AS as_text
LEFT JOIN LATERAL (
    SELECT w.reason, w.waits_for, w.until FROM pgoutbox.waiting_view AS w WHERE w.id = m.id
) AS waiting ON m.state = 'pending'
WHERE m.id = %(id)s::bigint
