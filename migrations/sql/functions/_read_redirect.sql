-- The redirect that an operator has switched on, and the blackout of today, or nulls. For the processes that hand
-- contents over: workers, and producers that send directly. They see no table. One row: a target never meets the topics
-- of another redirect.
CREATE FUNCTION pgoutbox._read_redirect()
RETURNS TABLE (target text, topics text[], exempt_topics text[], blackout text)
LANGUAGE plpgsql
STABLE
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    RETURN QUERY
    SELECT r.target, r.topics, r.exempt_topics, b.name
    FROM (SELECT min(v.name) AS name FROM pgoutbox.blackout_view AS v WHERE v.is_on) AS b
    LEFT JOIN pgoutbox.redirect AS r ON (r.until_at > now()) IS NOT FALSE;
END
$function$;
