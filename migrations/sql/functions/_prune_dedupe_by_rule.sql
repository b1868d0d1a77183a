-- The rule of all topics spares the keys of topics with a rule of their own.
CREATE FUNCTION pgoutbox._prune_dedupe_by_rule(
    rule_topic text, at_most bigint, after_topic text DEFAULT '', after_key text DEFAULT ''
)
RETURNS TABLE (last_topic text, last_key text, key_count bigint, forgotten_count bigint)
LANGUAGE sql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
LOCK TABLE pgoutbox.retention IN SHARE MODE;
SELECT d.last_topic, d.last_key, d.key_count, d.forgotten_count
FROM pgoutbox._delete_dedupe_keys(
    rule_topic,
    now() - (SELECT r.keep FROM pgoutbox.retention AS r WHERE r.topic = rule_topic AND r.state = 'dedupe_key'),
    rule_topic = '*', at_most, after_topic, after_key
) AS d
$function$;

COMMENT ON FUNCTION pgoutbox._prune_dedupe_by_rule IS
    'Delete the dedupe keys of one page that their rule no longer keeps.';
