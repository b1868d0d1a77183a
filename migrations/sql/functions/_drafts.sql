-- The drafts of an array of JSON objects, whose names are those of the type draft. A number is a time in seconds, and a
-- time has its zone, so that no setting of the session changes what a text means. The fields of a further type are
-- checked too, and left to the caller.
CREATE FUNCTION pgoutbox._drafts(messages jsonb, place text, further_type regclass DEFAULT NULL)
RETURNS pgoutbox.draft[]
LANGUAGE plpgsql
SET plan_cache_mode = force_generic_plan
AS $function$
DECLARE
    no_options constant pgoutbox.draft := pgoutbox._draft(NULL, 'null', NULL);
    text_names constant text[] := ARRAY(
        SELECT a.attname::text
        FROM pg_attribute AS a
        WHERE a.attrelid = 'pgoutbox.draft'::regclass AND a.atttypid = 'text'::regtype
    );
BEGIN
    IF messages IS NULL THEN
        PERFORM pgoutbox._raise_argument_error(place || ': must not be null');
    ELSIF jsonb_typeof(messages) <> 'array' OR jsonb_path_exists(messages, 'strict $[*] ? (@.type() != "object")') THEN
        PERFORM pgoutbox._raise_argument_error(place || ': must be a JSON array of objects');
    END IF;
    PERFORM pgoutbox._raise_argument_error(o.problem, place, o.n)
    FROM (
        SELECT m.ordinality - 1 AS n, CASE WHEN a.attname IS NULL THEN 'options' ELSE f.name END || ': ' || CASE
            WHEN a.attname IS NULL THEN 'unknown option ' || f.name
            WHEN jsonb_typeof(f.value) = 'null' THEN NULL
            WHEN a.atttypid = 'text'::regtype AND jsonb_typeof(f.value) <> 'string' THEN 'must be a text'
            WHEN a.atttypid = 'boolean'::regtype AND jsonb_typeof(f.value) <> 'boolean' THEN 'must be true or false'
            WHEN a.atttypid = 'integer'::regtype
                AND (jsonb_typeof(f.value) <> 'number' OR f.value #>> '{}' !~ '^-?[0-9]{1,9}$')
                THEN 'must be a whole number'
            WHEN a.atttypid = 'interval'::regtype
                AND (length(f.value::text) > 40 OR NOT jsonb_path_exists(f.value, 'strict $ ? (@.type() == "number" && @ >= 0 && @ <= 315360000)'))
                THEN 'must be a number of seconds, at most 3650 days'
            WHEN a.atttypid = 'timestamptz'::regtype AND NOT pgoutbox._is_time(f.value #>> '{}')
                THEN 'must be a time with its zone, such as 2026-01-31T09:00:00Z'
        END AS problem
        FROM jsonb_array_elements(messages) WITH ORDINALITY AS m(message, ordinality)
        CROSS JOIN LATERAL (SELECT m.message - '{payload,headers}'::text[]) AS o(options)
        CROSS JOIN jsonb_each(o.options) AS f(name, value)
        LEFT JOIN pg_attribute AS a
            ON a.attrelid IN ('pgoutbox.draft'::regclass, further_type) AND a.attname = f.name AND a.attnum > 0
        -- Most messages have texts only. To look up each of their fields would cost a tenth of their enqueue.
        WHERE o.options - text_names <> '{}' OR jsonb_path_exists(o.options, 'strict $.* ? (@.type() != "string")')
        UNION ALL
        SELECT m.ordinality - 1, 'payload: must be given (the JSON value null is accepted)'
        FROM jsonb_array_elements(messages) WITH ORDINALITY AS m(message, ordinality)
        WHERE NOT m.message ? 'payload'
    ) AS o
    WHERE o.problem IS NOT NULL
    ORDER BY o.n, o.problem
    LIMIT 1;
    RETURN ARRAY(
        -- Without the default, the JSON value null would be no payload.
        SELECT jsonb_populate_record(
            no_options,
            CASE WHEN jsonb_typeof(m.message -> 'payload') = 'null' THEN m.message - 'payload' ELSE m.message END
        )
        FROM jsonb_array_elements(messages) WITH ORDINALITY AS m(message, ordinality)
        ORDER BY m.ordinality
    );
END
$function$;
