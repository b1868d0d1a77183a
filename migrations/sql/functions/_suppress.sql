-- Write a suppression. One that is in force stays as it is. An ended one begins again, unless the request was made before
-- its end. Returns whether something has changed.
CREATE FUNCTION pgoutbox._suppress(
    digest text, mailing_list text, reason text, created_at timestamptz DEFAULT now(), asked_at timestamptz DEFAULT 'infinity'
)
RETURNS boolean
LANGUAGE plpgsql
AS $function$
#variable_conflict use_column
BEGIN
    INSERT INTO pgoutbox.suppression AS s (digest, mailing_list, reason, created_at)
    VALUES (_suppress.digest, coalesce(_suppress.mailing_list, ''), _suppress.reason, _suppress.created_at)
    ON CONFLICT ON CONSTRAINT suppression_pkey DO UPDATE
    SET created_at = excluded.created_at, ended_at = NULL, reason = excluded.reason
    WHERE s.ended_at < _suppress.asked_at;
    RETURN FOUND;
END
$function$;
