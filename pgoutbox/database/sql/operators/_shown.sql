-- The shown message `m`: its columns, why it waits, and as text the values that may be large. Python does not read all
-- JSON that PostgreSQL reads. `ShownMessage` has the names.
SELECT
    to_jsonb(m) || jsonb_build_object(
        'waits', waiting.reason,
        'waits_for', waiting.waits_for,
        'waits_until', waiting.until,
        'handled_as', waiting.handled_as,
        'cap', waiting.cap,
        'last_error', left(m.last_error, %(characters)s::integer),
        'headers', left(as_text.headers, %(characters)s::integer),
        'headers_bytes', octet_length(as_text.headers),
        'payload', left(as_text.payload, %(characters)s::integer),
        'payload_bytes', coalesce(octet_length(as_text.payload), 0)
    )
FROM m
-- With OFFSET 0 the text is only computed once.
CROSS JOIN LATERAL (SELECT m.headers::text AS headers, m.payload::text AS payload OFFSET 0) AS as_text
-- With m.id, which is not a constant, the view would be read for all messages.
LEFT JOIN LATERAL (
    SELECT w.reason, w.waits_for, w.until, w.handled_as, w.cap FROM pgoutbox.waiting_view AS w WHERE w.id = %(id)s::bigint
) AS waiting ON m.state = 'pending'
