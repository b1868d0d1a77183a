-- The end of a lease that was renewed in the table renewal; null for most attempts.
CREATE FUNCTION pgoutbox._renewed_until(p_message_id bigint, p_attempt_count integer, p_worker text)
RETURNS timestamptz
LANGUAGE sql
STABLE
RETURN (
    SELECT r.lease_expires_at
    FROM pgoutbox.renewal AS r
    WHERE r.message_id OPERATOR(pg_catalog.=) p_message_id
        AND r.attempt_count OPERATOR(pg_catalog.=) p_attempt_count
        AND r.worker OPERATOR(pg_catalog.=) p_worker
);

COMMENT ON FUNCTION pgoutbox._renewed_until IS 'End of the lease in the table renewal; null for most attempts.';
