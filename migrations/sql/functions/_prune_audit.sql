-- Delete a batch of the oldest acts that the rule of the audit no longer keeps.
CREATE FUNCTION pgoutbox._prune_audit(at_most bigint)
RETURNS TABLE (last_topic text, last_key text, key_count bigint, forgotten_count bigint)
LANGUAGE sql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
LOCK TABLE pgoutbox.retention IN SHARE MODE;
WITH deleted AS (
    DELETE FROM pgoutbox.audit AS a
    USING (
        -- The ids grow with the time, so the oldest rows are read by the primary key.
        SELECT oldest.id
        FROM (SELECT o.id, o.acted_at FROM pgoutbox.audit AS o ORDER BY o.id LIMIT at_most) AS oldest
        WHERE oldest.acted_at < now() - (
            SELECT r.keep FROM pgoutbox.retention AS r WHERE r.topic = '*' AND r.state = 'audit'
        )
    ) AS old
    WHERE a.id = old.id
    RETURNING a.id
)
SELECT '', '', count(*), count(*)
FROM deleted
$function$;
