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
    SELECT
        f.topic,
        pgoutbox._redacted_text(coalesce(pgoutbox._cause_of(f.last_error), '')) AS cause,
        count(*) AS messages,
        count(*) FILTER (WHERE f.finished_at > now() - interval '1 hour') AS last_hour,
        count(*) FILTER (
            WHERE f.finished_at <= now() - interval '1 hour' AND f.finished_at > now() - interval '2 hours'
        ) AS hour_before,
        count(*) FILTER (WHERE f.is_again) AS failed_again,
        min(f.finished_at) AS first_at,
        max(f.finished_at) AS last_at,
        max(f.id) AS newest_id
    FROM failed AS f
    GROUP BY f.topic, coalesce(pgoutbox._cause_of(f.last_error), '')
), m AS (
    SELECT
        s.topic,
        s.cause,
        sum(s.messages)::bigint AS messages,
        sum(s.last_hour)::bigint AS last_hour,
        sum(s.hour_before)::bigint AS hour_before,
        sum(s.failed_again)::bigint AS failed_again,
        min(s.first_at) AS first_at,
        max(s.last_at) AS last_at,
        max(s.newest_id) AS newest_id
    FROM stored AS s
    GROUP BY s.topic, s.cause
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
