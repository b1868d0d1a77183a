-- When retention rules stop keeping the messages that ended within this period; infinity if a message is never deleted,
-- and minus infinity if there is none. If every message in one of these states has a rule that deletes it, the longest
-- rule gives the time when all messages of a period are deleted. Otherwise only the messages themselves show it.
CREATE FUNCTION pgoutbox._kept_until(lower_at timestamptz, upper_at timestamptz)
RETURNS timestamptz
LANGUAGE plpgsql
VOLATILE
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET timezone = 'UTC'
SET datestyle = 'ISO, YMD'
AS $function$
DECLARE
    latest timestamptz;
BEGIN
    SELECT max(upper_at + r.keep)
    INTO latest
    FROM pgoutbox.retention AS r
    WHERE r.state IN ('sent', 'skipped', 'cancelled')
    HAVING bool_and(r.keep IS NOT NULL) AND count(*) FILTER (WHERE r.topic = '*') = 3;
    IF latest IS NOT NULL THEN
        RETURN latest;
    END IF;
    SELECT max(coalesce(ended.last_at + rule.keep, 'infinity'))
    INTO latest
    FROM (
        SELECT m.state, m.topic, max(m.finished_at) AS last_at
        FROM pgoutbox.message_done AS m
        WHERE m.finished_at >= lower_at AND m.finished_at < upper_at
        GROUP BY m.state, m.topic
    ) AS ended
    LEFT JOIN LATERAL (
        SELECT r.keep
        FROM pgoutbox.retention AS r
        WHERE r.state = ended.state AND r.topic IN (ended.topic, '*')
        ORDER BY r.topic = '*'
        LIMIT 1
    ) AS rule ON true;
    RETURN coalesce(latest, '-infinity');
END
$function$;
