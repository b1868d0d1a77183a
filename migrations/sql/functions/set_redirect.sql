-- Redirect e-mail to an address, or to @ and a domain, for a time or until clear_redirect: that of topics, or all,
-- except that of exempt_topics. A * at the end of a topic stands for the rest. Workers follow within two seconds of the
-- commit.
--
-- A worker hands nothing over by an answer that is older than two seconds. So the redirect holds for every hand-over
-- that begins more than two seconds after the commit of this function.
CREATE FUNCTION pgoutbox.set_redirect(
    target text,
    duration interval DEFAULT NULL,
    topics text[] DEFAULT NULL,
    exempt_topics text[] DEFAULT NULL
)
RETURNS TABLE (set_by text, set_at timestamptz, until_at timestamptz)
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
#variable_conflict use_column
DECLARE
    actor constant text := coalesce(pgoutbox._announced() ->> 'actor', session_user);
    atom constant text := '[A-Za-z0-9!#$%&''*+/=?^_`{|}~-]+';
    label constant text := '[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?';
    only_topics constant text[] := (SELECT array_agg(t.topic ORDER BY t.topic) FROM unnest(set_redirect.topics) AS t(topic));
    no_topics constant text[] := (
        SELECT array_agg(t.topic ORDER BY t.topic) FROM unnest(set_redirect.exempt_topics) AS t(topic)
    );
    problem text;
BEGIN
    -- The rule of workers, which hold all e-mail back for another target. With a domain, the longest name is 64 characters.
    IF (
        set_redirect.target ~ ('^(' || atom || '([.]' || atom || ')*)?@' || label || '([.]' || label || ')*$')
        AND strpos(set_redirect.target, '=?') = 0
        AND strpos(set_redirect.target, '@') <= 65
        AND length(set_redirect.target) <= CASE WHEN set_redirect.target LIKE '@%' THEN 190 ELSE 254 END
    ) IS NOT TRUE THEN
        problem := 'target: must be an address, or @ and a domain, in plain ASCII';
    ELSIF set_redirect.duration NOT BETWEEN interval '1 second' AND interval '10 years' THEN
        problem := 'duration: must be from 1 second to 10 years';
    ELSE
        SELECT l.name || ': must be at most 50 topics, each a name or its beginning and *'
        INTO problem
        FROM (VALUES ('topics', set_redirect.topics), ('exempt_topics', set_redirect.exempt_topics)) AS l(name, entries)
        WHERE cardinality(l.entries) > 50
            OR EXISTS (
                SELECT FROM unnest(l.entries) AS e(topic) WHERE (e.topic ~ '^[a-z][a-z0-9_.-]{0,62}[*]?$') IS NOT TRUE
            )
        LIMIT 1;
    END IF;
    PERFORM pgoutbox._raise_argument_error(problem, in_function => 'set_redirect');
    PERFORM pgoutbox._refuse_in_blackout('set_redirect: target');
    RETURN QUERY
    INSERT INTO pgoutbox.redirect AS r (target, set_by, set_at, until_at, topics, exempt_topics)
    VALUES (
        set_redirect.target, actor, clock_timestamp(), clock_timestamp() + set_redirect.duration, only_topics, no_topics
    )
    ON CONFLICT ON CONSTRAINT redirect_pkey DO UPDATE
    SET target = excluded.target,
        set_by = excluded.set_by,
        set_at = excluded.set_at,
        until_at = excluded.until_at,
        topics = excluded.topics,
        exempt_topics = excluded.exempt_topics
    RETURNING r.set_by, r.set_at, r.until_at;
    PERFORM pgoutbox._record_act(
        'redirect',
        details => jsonb_strip_nulls(jsonb_build_object(
            'target', set_redirect.target,
            'seconds', trim_scale(extract(epoch FROM set_redirect.duration)),
            'topics', only_topics,
            'exempt_topics', no_topics
        ))
    );
END
$function$;
