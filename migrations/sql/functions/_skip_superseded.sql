-- End those of the messages that are pending and not due, as superseded by the newest ones of their keys. A message
-- that is not due would wait until then for its claim, which ends it as superseded. A message that is due is left to
-- its claim; it may have fallen due after the start of this transaction. Rows that are locked are left out.
CREATE FUNCTION pgoutbox._skip_superseded(ids bigint[])
RETURNS void
LANGUAGE plpgsql
SET enable_seqscan = off
SET jit = off
SET plan_cache_mode = force_generic_plan
AS $function$
DECLARE
    older record;
BEGIN
    -- Most of them are due: this look is cheaper than the loop.
    IF NOT EXISTS (
        SELECT
        FROM pgoutbox.message_live AS m
        WHERE m.id = ANY (ids) AND m.state = 'pending' AND m.available_at > clock_timestamp()
    ) THEN
        RETURN;
    END IF;
    BEGIN
        FOR older IN
            SELECT m.id, (
                SELECT h.newest_id
                FROM pgoutbox.key_head AS h
                WHERE h.scope = m.topic AND h.key = m.coalesce_key
                LIMIT 1
            ) AS newer_id
            FROM unnest(ids) AS o(id)
            CROSS JOIN LATERAL (
                SELECT m.id, m.topic, m.coalesce_key
                FROM pgoutbox.message_live AS m
                WHERE m.id = o.id AND m.state = 'pending' AND m.available_at > clock_timestamp()
                FOR UPDATE SKIP LOCKED
            ) AS m
        LOOP
            UPDATE pgoutbox.message AS m
            SET state = 'skipped',
                finished_at = clock_timestamp(),
                superseded_by = older.newer_id,
                skip_reason = 'superseded by ' || older.newer_id
            WHERE m.id = older.id AND m.state = 'pending';
        END LOOP;
    EXCEPTION
        WHEN serialization_failure THEN
            NULL; -- Another session has changed one of them since the snapshot. All are left to their claims.
    END;
END
$function$;
