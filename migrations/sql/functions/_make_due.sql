-- Make up to at_most pending messages, whose last attempt has this value in a field, due at a time, and wake the
-- workers of their queues. Returns their number. Rows that are locked are left out; a second call finds them.
CREATE FUNCTION pgoutbox._make_due(field text, value text, due_at timestamptz, at_most bigint)
RETURNS bigint
LANGUAGE sql
AS $function$
WITH held AS MATERIALIZED (
    SELECT m.id
    FROM pgoutbox.message_live AS m
    WHERE m.state = 'pending'
        AND m.attempt_count > 0
        AND m.available_at > due_at
        AND m.attempts #>> ARRAY['-1', field] = value
    LIMIT at_most
    FOR UPDATE OF m SKIP LOCKED
), due AS (
    UPDATE pgoutbox.message_live AS m
    SET available_at = due_at
    FROM held AS h
    WHERE m.id = h.id AND m.state = 'pending'
    RETURNING m.queue
), woken AS MATERIALIZED (
    SELECT pgoutbox._wake_all_workers(q.queue) FROM (SELECT DISTINCT d.queue FROM due AS d) AS q
)
SELECT count(*) FROM due WHERE (SELECT count(*) FROM woken) >= 0
$function$;
