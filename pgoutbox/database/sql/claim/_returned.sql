-- The columns of a claimed message, in the order of `ClaimedRow`. JSON is returned as text, because not every
-- message is decoded here.
m.id, m.topic, m.destination,
-- Null if it has more than 16 kB, so that the rows of a claim are bounded: its attempt reads it by large_payload.sql.
-- A payload that is larger than that on the disk is left out without making its text. A smaller one may still have a
-- large text, for example of a repeated letter. OFFSET 0 makes the text once.
(
    SELECT CASE WHEN octet_length(p.body) <= 16384 THEN p.body END
    FROM (SELECT CASE WHEN pg_column_size(m.payload) <= 16384 THEN m.payload::text END OFFSET 0) AS p(body)
) AS payload_json,
-- An attempt fails for good at max_attempts, which snooze, release and redrive raise. attempt_budget is the number that
-- enqueue granted; it never changes.
m.headers::text AS headers_json, m.attempt_count, m.max_attempts, m.attempt_budget, m.created_at, m.available_at,
m.coalesce_key, m.ordering_key, m.content_id, m.claimed_at, m.state,
extract(epoch FROM CASE WHEN isfinite(m.expires_at) THEN m.expires_at - now() END)::float8 AS expires_in_seconds
