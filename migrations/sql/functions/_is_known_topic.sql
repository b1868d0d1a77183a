-- Whether a worker, a retention rule, a coalesce key or one of the newest 10,000 messages has this topic. For the
-- warnings of `pgoutbox enqueue` and `pgoutbox redirect set`: a wrong answer costs a line on stderr. So only the newest
-- messages are read. Producers may call it, so it answers about whole names: from beginnings of names they could find
-- the topics of others.
CREATE FUNCTION pgoutbox._is_known_topic(topic text)
RETURNS boolean
LANGUAGE sql
STABLE
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
SELECT EXISTS (SELECT FROM pgoutbox.key_head AS h WHERE h.scope = _is_known_topic.topic)
    OR EXISTS (SELECT FROM pgoutbox.worker_view AS w WHERE _is_known_topic.topic = ANY (w.topics))
    OR EXISTS (SELECT FROM pgoutbox.retention AS r WHERE r.topic = _is_known_topic.topic)
    OR EXISTS (
        SELECT
        FROM (SELECT m.topic FROM pgoutbox.message AS m ORDER BY m.id DESC LIMIT 10000) AS newest
        WHERE newest.topic = _is_known_topic.topic
    )
$function$;
