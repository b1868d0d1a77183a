-- Record a change of a retention rule in the audit.
CREATE FUNCTION pgoutbox._record_retention_act()
RETURNS trigger
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    rule constant pgoutbox.retention := CASE WHEN TG_OP = 'DELETE' THEN OLD ELSE NEW END;
BEGIN
    -- The audit is evidence against operators too, so only its owner may shorten it.
    IF rule.state = 'audit' AND NOT pg_has_role(session_user, current_user, 'MEMBER') THEN
        RAISE EXCEPTION 'pgoutbox: only the owner of the schema may change the retention of the audit' USING
            ERRCODE = 'insufficient_privilege',
            HINT = format('Connect as a member of the role %I.', current_user);
    END IF;
    PERFORM pgoutbox._record_act(
        'retention',
        details => jsonb_build_object(
            'topic', rule.topic,
            'state', rule.state,
            'keep_seconds', CASE
                WHEN TG_OP = 'DELETE' THEN '"no rule"'::jsonb
                WHEN rule.keep IS NULL THEN '"for ever"'::jsonb
                ELSE to_jsonb(trim_scale(extract(epoch FROM rule.keep)))
            END
        )
    );
    RETURN NULL;
END
$function$;

CREATE TRIGGER retention_acts
AFTER INSERT OR UPDATE OR DELETE ON pgoutbox.retention
FOR EACH ROW
EXECUTE FUNCTION pgoutbox._record_retention_act();
