-- A worker hands nothing over by an answer that is older than two seconds. So the redirect holds for every hand-over
-- that begins more than two seconds after the commit of this function.
CREATE FUNCTION pgoutbox.set_redirect(target text, duration interval DEFAULT NULL)
RETURNS TABLE (set_by text, set_at timestamptz, until_at timestamptz)
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET standard_conforming_strings = on
AS $function$
#variable_conflict use_column
DECLARE
    actor constant text := coalesce(pgoutbox._announced() ->> 'actor', session_user);
    atom constant text := '[A-Za-z0-9!#$%&''*+/=?^_`{|}~-]+';
    label constant text := '[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?';
    problem text;
    wrong text;
BEGIN
    -- The rule of workers, which hold all e-mail back for another target. With a domain, the longest name is 64 characters.
    IF (
        set_redirect.target ~ ('^(' || atom || '([.]' || atom || ')*)?@' || label || '([.]' || label || ')*$')
        AND strpos(set_redirect.target, '=?') = 0
        AND strpos(set_redirect.target, '@') <= 65
        AND length(set_redirect.target) <= CASE WHEN set_redirect.target LIKE '@%' THEN 190 ELSE 254 END
    ) IS NOT TRUE THEN
        wrong := 'target';
        problem := 'must be an address, or @ and a domain, in plain ASCII';
    ELSIF set_redirect.duration NOT BETWEEN interval '1 second' AND interval '10 years' THEN
        wrong := 'duration';
        problem := 'must be from 1 second to 10 years';
    END IF;
    IF problem IS NOT NULL THEN
        RAISE EXCEPTION USING
            ERRCODE = '22023', SCHEMA = 'pgoutbox', COLUMN = wrong,
            MESSAGE = 'pgoutbox.set_redirect: ' || wrong || ': ' || problem;
    END IF;
    PERFORM pgoutbox._refuse_in_blackout('set_redirect: target');
    RETURN QUERY
    INSERT INTO pgoutbox.redirect AS r (target, set_by, set_at, until_at)
    VALUES (set_redirect.target, actor, clock_timestamp(), clock_timestamp() + set_redirect.duration)
    ON CONFLICT ON CONSTRAINT redirect_pkey DO UPDATE
    SET target = excluded.target, set_by = excluded.set_by, set_at = excluded.set_at, until_at = excluded.until_at
    RETURNING r.set_by, r.set_at, r.until_at;
    PERFORM pgoutbox._record_act(
        'redirect',
        details => jsonb_strip_nulls(jsonb_build_object(
            'target', set_redirect.target, 'seconds', trim_scale(extract(epoch FROM set_redirect.duration))
        ))
    );
END
$function$;

COMMENT ON FUNCTION pgoutbox.set_redirect IS
    'Redirect all e-mail to an address, or to @ and a domain, for a time or until clear_redirect. Workers follow within two '
    'seconds of the commit.';
