-- Name the person behind the acts of this transaction, and where they come from. The audit records both as statements
-- of the database role, and `stated` apart from the details that it finds itself. Acts with the same act_id belong
-- together, if their role and actor are the same.
--
-- The given id becomes one that depends on the login and the actor. So nobody adds to the act of another one.
CREATE FUNCTION pgoutbox.announce_act(
    actor text DEFAULT NULL, origin text DEFAULT NULL, stated jsonb DEFAULT NULL, act_id uuid DEFAULT gen_random_uuid()
)
RETURNS void
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    person constant text := coalesce(announce_act.actor, session_user);
    wrong constant text := CASE
        WHEN length(person) NOT BETWEEN 1 AND 200 THEN 'actor: must have 1 to 200 characters'
        WHEN length(announce_act.origin) NOT BETWEEN 1 AND 200 THEN 'origin: must have 1 to 200 characters'
        WHEN jsonb_typeof(announce_act.stated) <> 'object' OR octet_length(announce_act.stated::text) > 8192
            -- Python reads no whole number of 5000 digits, and no list of 3000 levels. Then it would read no act at all.
            OR jsonb_path_exists(announce_act.stated, 'strict $.**{3 to last}')
            OR jsonb_path_exists(announce_act.stated, 'strict $.** ? (@.type() == "number" && (@ > 1e15 || @ < -1e15))')
            THEN 'stated: must be an object of at most 8192 bytes and two levels, with numbers of at most 15 digits'
    END;
    act constant text := jsonb_build_object(
        'id', left(pgoutbox._keyed_digest('id', jsonb_build_array(session_user, person, announce_act.act_id)::text), 32),
        'actor', person,
        'origin', announce_act.origin,
        'stated', announce_act.stated
    );
BEGIN
    PERFORM pgoutbox._raise_argument_error(wrong, in_function => 'announce_act');
    PERFORM set_config(
        'pgoutbox.act', pgoutbox._keyed_digest('act', pg_current_xact_id()::text || act) || act, true
    );
END
$function$;
