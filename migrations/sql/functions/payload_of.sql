CREATE FUNCTION pgoutbox.payload_of(m pgoutbox.message)
RETURNS jsonb
LANGUAGE sql
STABLE
RETURN coalesce(
    m.payload,
    (SELECT l.body FROM pgoutbox.large_payload AS l WHERE l.message_id OPERATOR(pg_catalog.=) m.id)
);

COMMENT ON FUNCTION pgoutbox.payload_of IS 'The payload of a message, from its row or from large_payload.';
