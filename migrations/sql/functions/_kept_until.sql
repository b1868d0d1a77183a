-- When retention rules stop keeping the messages that ended within this period; infinity if a message is never deleted,
-- and minus infinity if there is none. If every message in one of these states has a rule that deletes it, the longest
-- rule gives the time when all messages of a period are deleted. Otherwise only the messages themselves show it. A rule
-- that deletes sent messages at once keeps their dedupe keys, so these messages are deleted one by one. Only a partition
-- that is about to be dropped is read for them.
CREATE FUNCTION pgoutbox._kept_until(lower_at timestamptz, upper_at timestamptz)
RETURNS timestamptz
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET timezone = 'UTC'
AS $function$
DECLARE
    latest timestamptz;
    may_keep_keys boolean;
BEGIN
    SELECT max(upper_at + r.keep), bool_or(r.state = 'sent' AND r.keep = interval '0')
    INTO latest, may_keep_keys
    FROM pgoutbox.retention AS r
    WHERE r.state IN ('sent', 'skipped', 'cancelled')
    HAVING bool_and(r.keep IS NOT NULL) AND count(*) FILTER (WHERE r.topic = '*') = 3;
    IF latest > now() OR NOT may_keep_keys THEN
        RETURN latest;
    END IF;
    SELECT max(CASE
        WHEN ended.keep = interval '0' AND ended.has_key THEN 'infinity'
        ELSE coalesce(ended.last_at + ended.keep, 'infinity')
    END)
    INTO latest
    FROM (
        SELECT
            max(m.finished_at) AS last_at,
            bool_or(m.state = 'sent' AND m.dedupe_key IS NOT NULL) AS has_key,
            pgoutbox._keep_of(m.topic, m.state) AS keep
        FROM pgoutbox.message_done AS m
        WHERE m.finished_at >= lower_at AND m.finished_at < upper_at
        GROUP BY m.state, m.topic
    ) AS ended;
    RETURN coalesce(latest, '-infinity');
END
$function$;
