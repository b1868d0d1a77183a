-- Create a schedule, or change that of this name. The rule is five fields of cron, such as 0 7 * * mon-fri, or `every` and a
-- number of seconds. The message is an item of enqueue_many without dedupe_key, available_at and expires_at. A change of the
-- message keeps the next time. Returns false if nothing is changed.
CREATE FUNCTION pgoutbox.set_schedule(
    name text,
    rule text,
    message jsonb,
    timezone text DEFAULT 'UTC',
    missed text DEFAULT 'latest',
    jitter interval DEFAULT '0',
    until_at timestamptz DEFAULT NULL,
    is_declared boolean DEFAULT false
)
RETURNS boolean
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
#variable_conflict use_column
DECLARE
    own_names constant text[] := '{dedupe_key, available_at, expires_at}';
BEGIN
    PERFORM pgoutbox._raise_argument_error(CASE
        WHEN set_schedule.name IS NULL THEN 'name: must not be null'
        WHEN length(set_schedule.name) > 63 OR set_schedule.name !~ '^[a-z][a-z0-9_.-]*$'
            THEN 'name: must be 1 to 63 of a-z, 0-9, underscore, dot and hyphen, the first a letter'
        WHEN set_schedule.rule IS NULL THEN 'rule: must not be null'
        WHEN set_schedule.rule !~ '^(every [1-9][0-9]{0,7}|[0-9A-Za-z*,/#-]+( [0-9A-Za-z*,/#-]+){4})$'
            THEN 'rule: must be five fields of cron, or every and a number of seconds'
        WHEN length(set_schedule.rule) > 200 THEN 'rule: must not be longer than 200 characters'
        WHEN set_schedule.message IS NULL THEN 'message: must not be null'
        WHEN jsonb_typeof(set_schedule.message) <> 'object' THEN 'message: must be a JSON object, an item of enqueue_many'
        WHEN set_schedule.message ?| own_names THEN 'message: must not have dedupe_key, available_at or expires_at'
        WHEN set_schedule.timezone IS NULL THEN 'timezone: must not be null'
        WHEN (set_schedule.missed IN ('latest', 'all', 'none')) IS NOT TRUE THEN 'missed: must be latest, all or none'
        WHEN (set_schedule.jitter BETWEEN interval '0' AND interval '1 day') IS NOT TRUE
            THEN 'jitter: must be from 0 to a day'
        WHEN set_schedule.until_at NOT BETWEEN timestamptz '2000-01-01 00:00Z' AND timestamptz '3000-01-01 00:00Z'
            THEN 'until_at: must be between the years 2000 and 3000'
        WHEN set_schedule.is_declared IS NULL THEN 'is_declared: must not be null'
    END, in_function => 'set_schedule');
    PERFORM now() AT TIME ZONE set_schedule.timezone; -- An unknown one is an error.
    PERFORM pgoutbox._raise_argument_error(pgoutbox._draft_error(d), in_function => 'set_schedule')
    FROM unnest(pgoutbox._drafts(
        jsonb_build_array(
            CASE
                WHEN jsonb_typeof(coalesce(nullif(set_schedule.message -> 'headers', 'null'), '{}')) = 'object'
                    -- Those that a tick adds.
                    THEN set_schedule.message || jsonb_build_object('headers', coalesce(
                        nullif(set_schedule.message -> 'headers', 'null'), '{}'
                    ) || '{"schedule": "", "scheduled-for": ""}')
                ELSE set_schedule.message
            END
        ),
        'message'
    )) AS d;
    INSERT INTO pgoutbox.schedule AS s (name, rule, message, timezone, missed, jitter, until_at, is_declared)
    VALUES (
        set_schedule.name, set_schedule.rule, set_schedule.message, set_schedule.timezone, set_schedule.missed,
        set_schedule.jitter, set_schedule.until_at, set_schedule.is_declared
    )
    ON CONFLICT ON CONSTRAINT schedule_pkey DO UPDATE
    SET rule = excluded.rule,
        message = excluded.message,
        timezone = excluded.timezone,
        missed = excluded.missed,
        jitter = excluded.jitter,
        until_at = excluded.until_at,
        is_declared = excluded.is_declared,
        revision = s.revision + 1,
        changed_at = CASE
            WHEN s.paused_at IS NULL AND s.ended_at IS NULL THEN least(now(), coalesce(s.next_at, s.changed_at))
            ELSE now()
        END,
        problem = NULL,
        retry_at = NULL,
        ended_at = NULL,
        next_at = CASE
            WHEN (s.rule, s.timezone) = (excluded.rule, excluded.timezone) AND s.ended_at IS NULL THEN s.next_at
        END
    WHERE (s.rule, s.message, s.timezone, s.missed, s.jitter, s.until_at, s.is_declared) IS DISTINCT FROM (
        excluded.rule, excluded.message, excluded.timezone, excluded.missed, excluded.jitter, excluded.until_at,
        excluded.is_declared
    );
    RETURN FOUND;
END
$function$;
