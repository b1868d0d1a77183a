-- Delete the old dedupe keys of one page whose message is deleted. By age alone, for a prune without rules. Its caller
-- chooses the age, so it is an act: a message with the key of a sent one is sent again.
CREATE FUNCTION pgoutbox._prune_dedupe(
    older_than interval, only_topic text, at_most bigint, after_topic text DEFAULT '', after_key text DEFAULT ''
)
RETURNS TABLE (last_topic text, last_key text, key_count bigint, forgotten_count bigint)
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    IF older_than IS NULL THEN
        RETURN;
    END IF;
    SELECT d.last_topic, d.last_key, d.key_count, d.forgotten_count
    INTO last_topic, last_key, key_count, forgotten_count
    FROM pgoutbox._delete_dedupe_keys(only_topic, now() - older_than, at_most, after_topic, after_key) AS d;
    IF forgotten_count > 0 THEN
        PERFORM pgoutbox._record_act('prune', details => jsonb_build_object('dedupe_keys', forgotten_count));
    END IF;
    IF key_count > 0 THEN
        RETURN NEXT;
    END IF;
END
$function$;
