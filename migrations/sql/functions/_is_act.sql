-- Whether this session or transaction belongs to an operator, not to an application or a worker. Triggers and functions
-- ask this about changes that applications and workers also make. A login that can also enqueue or deliver counts as an
-- application or a worker, and so does the owner: their changes are acts only if the transaction has announced one.
-- Only operators and the owner may announce.
CREATE FUNCTION pgoutbox._is_act()
RETURNS boolean
LANGUAGE sql
STABLE
AS $function$
SELECT pgoutbox._announced() IS NOT NULL
    OR (
        pg_has_role(session_user, to_regrole('pgoutbox_operator'), 'MEMBER') IS TRUE
        AND pg_has_role(session_user, to_regrole('pgoutbox_producer'), 'USAGE') IS NOT TRUE
        AND pg_has_role(session_user, to_regrole('pgoutbox_worker'), 'USAGE') IS NOT TRUE
    )
$function$;
