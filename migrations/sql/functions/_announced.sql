-- The id, actor and origin of the act that announce_act has announced in this transaction, and its statement; or null. The
-- setting counts only with the digest that announce_act makes for this transaction. So a session cannot forge it, and a
-- pooler cannot carry it to another client.
CREATE FUNCTION pgoutbox._announced()
RETURNS jsonb
LANGUAGE plpgsql
STABLE
AS $function$
DECLARE
    sealed constant text := current_setting('pgoutbox.act', true);
BEGIN
    -- The digest needs a transaction id, which a cancel of nothing does not.
    RETURN CASE
        WHEN coalesce(sealed, '') = '' THEN NULL
        WHEN left(sealed, 64) = pgoutbox._keyed_digest('act', pg_current_xact_id()::text || substr(sealed, 65))
        THEN substr(sealed, 65)::jsonb
    END;
END
$function$;
