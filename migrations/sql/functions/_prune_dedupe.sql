-- Delete the old dedupe keys of one page whose message is deleted. By age alone, for a prune without rules. Its caller
-- chooses the age, so it is an act: a message with the key of a sent one is sent again.
CREATE FUNCTION pgoutbox._prune_dedupe(
    older_than interval, only_topic text, at_most bigint, after_topic text DEFAULT '', after_key text DEFAULT ''
)
RETURNS TABLE (last_topic text, last_key text, key_count bigint, forgotten_count bigint)
LANGUAGE sql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
WITH page AS MATERIALIZED (
    SELECT d.*
    FROM pgoutbox._delete_dedupe_keys(only_topic, now() - older_than, at_most, after_topic, after_key) AS d
    WHERE older_than IS NOT NULL -- Without an age, the rules would decide.
), recorded AS MATERIALIZED (
    SELECT pgoutbox._record_act('prune', details => jsonb_build_object('dedupe_keys', p.forgotten_count))
    FROM page AS p
    WHERE p.forgotten_count > 0
)
SELECT p.* FROM page AS p WHERE (SELECT count(*) FROM recorded) >= 0
$function$;
