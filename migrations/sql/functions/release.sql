-- Take messages in flight away from their worker, for an attempt that does not end. The attempt counts as lost when two
-- leases have ended, and the message is tried again with one more attempt; it may be delivered twice. Returns for each
-- message released, missing, wrong_state (not in flight), changed (not at this attempt) or locked (try again).
--
-- The message gets a claim that nobody renews, with the lease that its worker has now. When it ends, the recovery of lost
-- attempts extends it once, by the lease that its worker has then: this transaction may commit late. Its worker stops the
-- attempt within seconds of the commit, and until the lease ends no other one begins: so a coalesce or ordering key has at
-- most one message in flight, as after the loss of a worker.
CREATE FUNCTION pgoutbox.release(ids bigint[], attempt_counts integer[] DEFAULT NULL)
RETURNS SETOF pgoutbox.act_result
LANGUAGE sql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
WITH asked AS (
    SELECT DISTINCT ON (a.id) a.id, a.attempt_count
    FROM unnest(ids, attempt_counts) AS a(id, attempt_count)
    ORDER BY a.id
), held AS MATERIALIZED (
    SELECT m.id, m.queue, m.worker, m.claimed_at, c.lease_expires_at
    FROM asked AS a
    JOIN pgoutbox.message_live AS m ON m.id = a.id
    JOIN pgoutbox.claim AS c ON c.worker = m.worker AND c.claimed_at = m.claimed_at AND c.released_from IS NULL
    WHERE m.state = 'sending' AND m.attempt_count = coalesce(a.attempt_count, m.attempt_count)
    ORDER BY m.id
    FOR UPDATE OF m SKIP LOCKED
), released AS (
    UPDATE pgoutbox.message_live AS m
    SET worker = h.worker || ' (released message ' || h.id || ')', max_attempts = m.max_attempts + 1
    FROM held AS h
    WHERE m.id = h.id AND m.state = 'sending' AND m.worker = h.worker AND m.claimed_at = h.claimed_at
    RETURNING m.id, m.worker
), claim AS (
    INSERT INTO pgoutbox.claim (claimed_at, lease_expires_at, queue, worker, ids, released_from)
    SELECT h.claimed_at, h.lease_expires_at, h.queue, r.worker, ARRAY[h.id], h.worker
    FROM released AS r
    JOIN held AS h ON h.id = r.id
), recorded AS MATERIALIZED (
    SELECT pgoutbox._record_act('release', message_ids => array_agg(r.id ORDER BY r.id))
    FROM released AS r
    HAVING count(*) > 0
)
SELECT
    a.id,
    CASE
        WHEN r.id IS NOT NULL AND (SELECT count(*) FROM recorded) > 0 THEN 'released'
        WHEN m.id IS NULL THEN 'missing'
        WHEN m.state <> 'sending' THEN 'wrong_state'
        WHEN m.attempt_count <> a.attempt_count THEN 'changed'
        WHEN c.released_from IS NOT NULL THEN 'released'
        ELSE 'locked'
    END,
    m.state,
    NULL::bigint
FROM asked AS a
LEFT JOIN pgoutbox.message AS m ON m.id = a.id
LEFT JOIN pgoutbox.claim AS c ON c.worker = m.worker AND c.claimed_at = m.claimed_at
LEFT JOIN released AS r ON r.id = a.id
ORDER BY a.id
$function$;
