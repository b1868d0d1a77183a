CREATE FUNCTION pgoutbox._record_retention_act()
RETURNS trigger
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    rule constant pgoutbox.retention := CASE WHEN TG_OP = 'DELETE' THEN OLD ELSE NEW END;
BEGIN
    PERFORM pgoutbox._record_act(
        'retention',
        details => jsonb_build_object(
            'topic', rule.topic,
            'state', rule.state,
            'keep_seconds', CASE
                WHEN TG_OP = 'DELETE' THEN '"no rule"'::jsonb
                WHEN rule.keep IS NULL THEN '"for ever"'::jsonb
                ELSE to_jsonb(extract(epoch FROM rule.keep)::float8)
            END
        )
    );
    RETURN NULL;
END
$function$;

COMMENT ON FUNCTION pgoutbox._record_retention_act IS 'Record a change of a retention rule in the audit.';

CREATE TRIGGER retention_acts
AFTER INSERT OR UPDATE OR DELETE ON pgoutbox.retention
FOR EACH ROW
EXECUTE FUNCTION pgoutbox._record_retention_act();
