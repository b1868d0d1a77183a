-- One message with the structure of its payload, for roles that may not read payloads.
SELECT
    \ir _shown.sql
FROM (SELECT * FROM pgoutbox.message_view AS v WHERE v.id = %(id)s::bigint OFFSET 0) AS m
-- With OFFSET 0 the columns and the text are only computed once.
CROSS JOIN LATERAL (SELECT m.headers::text AS headers, m.payload::text AS payload OFFSET 0) AS as_text
LEFT JOIN LATERAL (
    SELECT w.reason, w.waits_for, w.until FROM pgoutbox.waiting_view AS w WHERE w.id = m.id
) AS waiting ON m.state = 'pending'
