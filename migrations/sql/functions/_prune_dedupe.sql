-- By age alone, for a prune without rules.
CREATE FUNCTION pgoutbox._prune_dedupe(
    older_than interval, only_topic text, at_most bigint, after_topic text DEFAULT '', after_key text DEFAULT ''
)
RETURNS TABLE (last_topic text, last_key text, key_count bigint, forgotten_count bigint)
LANGUAGE sql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
SELECT d.last_topic, d.last_key, d.key_count, d.forgotten_count
FROM pgoutbox._delete_dedupe_keys(only_topic, now() - older_than, false, at_most, after_topic, after_key) AS d
$function$;

COMMENT ON FUNCTION pgoutbox._prune_dedupe IS 'Delete the old dedupe keys of one page whose message is deleted.';
