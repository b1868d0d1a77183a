-- The draft with these options, which are the fields of the type draft.
CREATE FUNCTION pgoutbox._draft(topic text, payload jsonb, options jsonb)
RETURNS pgoutbox.draft
LANGUAGE plpgsql
STABLE
AS $function$
DECLARE
    draft pgoutbox.draft := jsonb_populate_record(NULL::pgoutbox.draft, options);
BEGIN
    draft.topic := topic;
    draft.payload := payload;
    RETURN draft;
END
$function$;
