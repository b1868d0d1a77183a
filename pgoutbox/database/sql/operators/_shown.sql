-- One shown message: its columns, why it waits, and as text the values that may be large. Python does not read all JSON that
-- PostgreSQL reads. `ShownMessage` has the names.
to_jsonb(m) || jsonb_build_object(
    'waits', waiting.reason,
    'waits_for', waiting.waits_for,
    'waits_until', waiting.until,
    'last_error', left(m.last_error, %(characters)s::integer),
    'headers', left(as_text.headers, %(characters)s::integer),
    'headers_bytes', octet_length(as_text.headers),
    'payload', left(as_text.payload, %(characters)s::integer),
    'payload_bytes', coalesce(octet_length(as_text.payload), 0)
)
