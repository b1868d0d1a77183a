-- Delete the dedupe keys of one page whose message is deleted, and which no rule keeps. By the rules in their current
-- version: a transaction that changes one waits for the page.
CREATE FUNCTION pgoutbox._prune_dedupe_by_rule(at_most bigint, after_topic text DEFAULT '', after_key text DEFAULT '')
RETURNS TABLE (last_topic text, last_key text, key_count bigint, forgotten_count bigint)
LANGUAGE sql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
LOCK TABLE pgoutbox.retention IN SHARE MODE;
SELECT d.last_topic, d.last_key, d.key_count, d.forgotten_count
FROM pgoutbox._delete_dedupe_keys(NULL, NULL, at_most, after_topic, after_key) AS d
$function$;
