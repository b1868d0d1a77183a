-- The failed messages by topic and cause, those with the most failures in the last hour first. The cause is the error
-- without addresses, quoted values, ids and numbers; error and place are those of the newest message. failed_again
-- counts the messages that had failed before and were redriven.
--
-- The views redact the error of each row, which is slow for many. This function groups the errors as they are stored, and
-- redacts each group. The newest failures are those that failed last.
CREATE FUNCTION pgoutbox.failures(
    since timestamptz DEFAULT '-infinity',
    until timestamptz DEFAULT 'infinity',
    topic text DEFAULT NULL,
    newest bigint DEFAULT 100000
)
RETURNS TABLE (
    topic text,
    cause text,
    error_group text,
    messages bigint,
    last_hour bigint,
    hour_before bigint,
    failed_again bigint,
    first_at timestamptz,
    last_at timestamptz,
    newest_id bigint,
    error text,
    place text
)
LANGUAGE sql
STABLE
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
WITH failed AS MATERIALIZED (
    SELECT
        m.id, m.topic, m.last_error, m.finished_at,
        -- Only a redrive lets a message go on after an attempt that failed. max_attempts does not tell, because snoozes
        -- raise it too.
        m.attempts @? '$[0 to last - 1] ? (@.outcome == "failed")' AS is_again
    FROM pgoutbox.message AS m
    WHERE m.state = 'failed'
        AND (failures.topic IS NULL OR m.topic = failures.topic)
        AND m.finished_at >= failures.since
        AND m.finished_at < failures.until
    -- By the index of this time, whatever the plan: by id, a read of the failures of an hour could pass over all others.
    ORDER BY m.finished_at DESC
    LIMIT failures.newest
), stored AS MATERIALIZED (
    SELECT f.*, coalesce(pgoutbox._cause_of(f.last_error), '') AS cause FROM failed AS f
), redacted AS MATERIALIZED (
    SELECT c.cause AS stored, pgoutbox._redacted_text(c.cause) AS cause
    FROM (SELECT DISTINCT s.cause FROM stored AS s) AS c
), m AS (
    SELECT
        s.topic,
        r.cause,
        count(*) AS messages,
        count(*) FILTER (WHERE s.finished_at > now() - interval '1 hour') AS last_hour,
        count(*) FILTER (
            WHERE s.finished_at <= now() - interval '1 hour' AND s.finished_at > now() - interval '2 hours'
        ) AS hour_before,
        count(*) FILTER (WHERE s.is_again) AS failed_again,
        min(s.finished_at) AS first_at,
        max(s.finished_at) AS last_at,
        max(s.id) AS newest_id
    FROM stored AS s
    JOIN redacted AS r ON r.stored = s.cause
    GROUP BY s.topic, r.cause
)
SELECT
    m.topic,
    nullif(m.cause, ''),
    pgoutbox._error_group(m.topic, m.cause),
    m.messages,
    m.last_hour,
    m.hour_before,
    m.failed_again,
    m.first_at,
    m.last_at,
    m.newest_id,
    left(pgoutbox._redacted_text(left(example.last_error, 1000)), 300),
    example.attempts #>> '{-1,error_place}'
FROM m
JOIN pgoutbox.message AS example ON example.id = m.newest_id AND example.state = 'failed'
ORDER BY m.last_hour DESC, m.messages DESC, m.topic, m.cause
$function$;
