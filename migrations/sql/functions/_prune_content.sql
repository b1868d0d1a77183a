-- Delete the contents of one page whose last message is deleted. The page is as in _delete_dedupe_keys.
CREATE FUNCTION pgoutbox._prune_content(at_most bigint, after_id bigint DEFAULT 0)
RETURNS TABLE (last_id bigint, content_count bigint, forgotten_count bigint)
LANGUAGE sql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET jit = off
AS $function$
WITH page AS MATERIALIZED (
    SELECT c.id
    FROM pgoutbox.content AS c
    WHERE c.id > after_id
    ORDER BY c.id
    LIMIT at_most
), forgotten AS (
    DELETE FROM pgoutbox.content AS c
    USING page AS p
    WHERE c.id = p.id AND (SELECT m.id FROM pgoutbox.message AS m WHERE m.content_id = p.id LIMIT 1) IS NULL
    RETURNING c.id
)
SELECT p.id, (SELECT count(*) FROM page), (SELECT count(*) FROM forgotten)
FROM page AS p
ORDER BY p.id DESC
LIMIT 1
$function$;
