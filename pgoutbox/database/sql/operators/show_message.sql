-- One message with its payload, for roles that may read payloads.
SELECT
    \ir _shown.sql
FROM (
    SELECT t.*, v.lease_expires_at, v.cancel_requested_at
    FROM pgoutbox.message AS t
    JOIN pgoutbox.message_view AS v ON v.id = t.id AND v.state = t.state
    WHERE t.id = %(id)s::bigint
) AS m
-- With OFFSET 0 the text is only computed once.
CROSS JOIN LATERAL (SELECT m.headers::text AS headers, m.payload::text AS payload OFFSET 0) AS as_text
LEFT JOIN LATERAL (
    SELECT w.reason, w.waits_for, w.until FROM pgoutbox.waiting_view AS w WHERE w.id = m.id
) AS waiting ON m.state = 'pending'
