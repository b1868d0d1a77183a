-- A message that is not due would wait until then for its claim, which ends it as superseded. A message that is due is
-- left to its claim; it may have fallen due after the start of this transaction. Rows that are locked are left out. At
-- another isolation level than read committed, a row that a worker has changed since the snapshot would make the
-- caller's transaction fail.
CREATE FUNCTION pgoutbox._skip_superseded(ids bigint[], newer_ids bigint[])
RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $function$
BEGIN
    IF NOT pgoutbox._reads_committed() THEN
        RETURN;
    END IF;
    WITH locked AS MATERIALIZED (
        SELECT m.id, o.newer_id
        FROM unnest(ids, newer_ids) AS o(id, newer_id)
        JOIN pgoutbox.message_live AS m ON m.id = o.id
        WHERE m.state = 'pending' AND m.available_at > clock_timestamp()
        FOR UPDATE OF m SKIP LOCKED
    )
    UPDATE pgoutbox.message AS m
    SET state = 'skipped',
        finished_at = clock_timestamp(),
        superseded_by = l.newer_id,
        skip_reason = 'superseded by ' || l.newer_id
    FROM locked AS l
    WHERE m.id = l.id AND m.state = 'pending';
END
$function$;

COMMENT ON FUNCTION pgoutbox._skip_superseded IS
    'End those of the messages as superseded by the newer ones that are pending and not due.';
