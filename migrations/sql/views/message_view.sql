-- Every message, redacted: payload and headers without values, and texts without the values of names such as password.
--
-- The views read with their owner's privileges, so that viewers need none on the tables: hence not `security_invoker`.
-- They hide no rows, so `security_barrier`, which keeps conditions away from indexes, would protect nothing.
CREATE VIEW pgoutbox.message_view AS
SELECT
    m.id,
    m.topic,
    m.payload_version,
    m.queue,
    pgoutbox._redacted_text(m.destination) AS destination,
    m.state,
    m.attempt_count,
    m.max_attempts,
    m.attempt_budget,
    m.lane,
    m.created_at,
    m.available_at,
    m.expires_at,
    (m.attempts #>> '{0,started_at}')::timestamptz AS first_attempt_at,
    m.claimed_at,
    (
        SELECT c.lease_expires_at
        FROM pgoutbox.claim AS c
        WHERE c.worker = m.worker AND c.claimed_at = m.claimed_at AND m.state = 'sending'
    ) AS lease_expires_at,
    (
        SELECT min(c.requested_at)
        FROM pgoutbox.cancel_request AS c
        WHERE c.message_id = m.id AND c.message_created_at = m.created_at
    ) AS cancel_requested_at,
    m.finished_at,
    m.worker,
    m.coalesce_key,
    m.dedupe_key,
    m.ordering_key,
    m.fair_key,
    m.owner,
    m.halts_key,
    m.superseded_by,
    m.resend_of,
    m.failure_of,
    m.content_id,
    pgoutbox._redacted_text(m.skip_reason) AS skip_reason,
    pgoutbox._redacted_text(m.last_error) AS last_error,
    pgoutbox._redacted_text(pgoutbox._cause_of(m.last_error)) AS cause,
    m.attempts #>> '{-1,error_place}' AS error_place,
    m.attempts #>> '{-1,reason_code}' AS reason_code,
    m.attempts #>> '{-1,breaker_key}' AS breaker_key,
    pgoutbox._redacted_json(m.headers) AS headers,
    pgoutbox._redacted_json(m.payload) AS payload
FROM pgoutbox.message AS m;
