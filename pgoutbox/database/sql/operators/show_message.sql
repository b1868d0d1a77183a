-- One message with its payload, for roles that may read payloads.
WITH m AS MATERIALIZED (
    SELECT t.*, v.lease_expires_at, v.cancel_requested_at
    FROM pgoutbox.message AS t
    JOIN pgoutbox.message_view AS v ON v.id = t.id AND v.state = t.state
    WHERE t.id = %(id)s::bigint
)
\ir _shown.sql
