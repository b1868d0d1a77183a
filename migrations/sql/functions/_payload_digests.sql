-- Digests by which enqueue recognizes a repeated payload; several for an encrypted one. Encrypting the same payload
-- gives a different text each time. So an encrypted payload contains digests, one for each key of its producer. Any of
-- them identifies a repeated payload, so that keys can be rotated. PostgreSQL inlines the body.
CREATE FUNCTION pgoutbox._payload_digests(payload jsonb)
RETURNS bytea[]
LANGUAGE sql
STABLE
RETURN coalesce(
    CASE WHEN payload -> 'pgoutbox.encrypted' IS NOT NULL THEN pgoutbox._encrypted_digests(payload) END,
    ARRAY[sha256(convert_to(payload::text, 'UTF8'))]
);
