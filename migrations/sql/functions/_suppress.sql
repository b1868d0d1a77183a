-- Write a suppression. One that is in force stays as it is. An ended one begins again, unless the request was made before
-- its end. Returns whether something has changed.
CREATE FUNCTION pgoutbox._suppress(
    digest text,
    mailing_list text,
    reason text,
    detail text DEFAULT NULL,
    created_at timestamptz DEFAULT now(),
    asked_at timestamptz DEFAULT 'infinity'
)
RETURNS boolean
LANGUAGE plpgsql
AS $function$
#variable_conflict use_column
BEGIN
    INSERT INTO pgoutbox.suppression AS s (digest, mailing_list, reason, detail, created_at)
    VALUES (
        _suppress.digest,
        coalesce(_suppress.mailing_list, ''),
        _suppress.reason,
        -- A bounce often quotes the address.
        left(regexp_replace(_suppress.detail, '[^[:space:]]*@[^[:space:]]*', '(address)', 'g'), 200),
        coalesce(_suppress.created_at, now())
    )
    ON CONFLICT ON CONSTRAINT suppression_pkey DO UPDATE
    SET created_at = excluded.created_at, ended_at = NULL, reason = excluded.reason, detail = excluded.detail
    WHERE s.ended_at < _suppress.asked_at;
    RETURN FOUND;
END
$function$;
