-- The message gets a claim that nobody renews, until the lease that its worker has now. The worker of the attempt stops it
-- within seconds, and until that lease ends no other one begins: so a coalesce or ordering key has at most one message
-- in flight, as after the loss of a worker. Then the recovery of lost attempts takes it.
CREATE FUNCTION pgoutbox.release(ids bigint[])
RETURNS TABLE (id bigint, result text, state text, lease_expires_at timestamptz)
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET standard_conforming_strings = on
AS $function$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    WITH asked AS (
        SELECT DISTINCT a.id FROM unnest(ids) AS a(id)
    ), held AS MATERIALIZED (
        SELECT m.id, m.worker, c.queue, c.claimed_at, c.lease_expires_at
        FROM asked AS a
        JOIN pgoutbox.message_live AS m ON m.id = a.id
        JOIN pgoutbox.claim AS c ON c.worker = m.worker AND c.claimed_at = m.claimed_at
        WHERE m.state = 'sending' AND strpos(m.worker, ' (released message ') = 0
        ORDER BY m.id
        -- The lock of the claim keeps its worker from renewing the lease meanwhile.
        FOR UPDATE OF m SKIP LOCKED
        FOR SHARE OF c SKIP LOCKED
    ), released AS (
        UPDATE pgoutbox.message_live AS m
        SET worker = h.worker || ' (released message ' || h.id || ')', max_attempts = m.max_attempts + 1
        FROM held AS h
        WHERE m.id = h.id AND m.state = 'sending' AND m.worker = h.worker AND m.claimed_at = h.claimed_at
        RETURNING m.id, m.worker
    ), claim AS (
        INSERT INTO pgoutbox.claim (claimed_at, lease_expires_at, queue, worker, ids)
        SELECT h.claimed_at, h.lease_expires_at, h.queue, r.worker, ARRAY[h.id]
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
            WHEN strpos(m.worker, ' (released message ') > 0 THEN 'released'
            ELSE 'locked'
        END,
        m.state,
        c.lease_expires_at
    FROM asked AS a
    LEFT JOIN pgoutbox.message AS m ON m.id = a.id
    LEFT JOIN pgoutbox.claim AS c ON c.worker = m.worker AND c.claimed_at = m.claimed_at
    LEFT JOIN released AS r ON r.id = a.id
    ORDER BY a.id;
END
$function$;

COMMENT ON FUNCTION pgoutbox.release IS
    'Take messages in flight away from their worker, for an attempt that does not end. The attempt counts as lost when its '
    'lease ends, at the returned time, and the message is tried again with one more attempt; it may be delivered twice. '
    'Returns for each message released, missing, wrong_state (not in flight) or locked (try again).';
