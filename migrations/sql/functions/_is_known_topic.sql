-- For the warnings of `pgoutbox enqueue` and `pgoutbox redirect set`: a wrong answer costs a line on stderr. So only the
-- newest messages are read.
CREATE FUNCTION pgoutbox._is_known_topic(topic text)
RETURNS boolean
LANGUAGE sql
STABLE
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET standard_conforming_strings = on
AS $function$
SELECT EXISTS (SELECT FROM pgoutbox.key_head AS h WHERE h.scope = _is_known_topic.topic)
    OR EXISTS (
        SELECT
        FROM pgoutbox.worker AS w
        CROSS JOIN LATERAL unnest(w.topics) AS t(topic)
        WHERE t.topic = _is_known_topic.topic
            OR (_is_known_topic.topic LIKE '%*' AND starts_with(t.topic, left(_is_known_topic.topic, -1)))
    )
    OR EXISTS (SELECT FROM pgoutbox.retention AS r WHERE r.topic = _is_known_topic.topic)
    OR EXISTS (
        SELECT
        FROM (SELECT m.topic FROM pgoutbox.message AS m ORDER BY m.id DESC LIMIT 10000) AS newest
        WHERE newest.topic = _is_known_topic.topic
            OR (_is_known_topic.topic LIKE '%*' AND starts_with(newest.topic, left(_is_known_topic.topic, -1)))
    )
$function$;

COMMENT ON FUNCTION pgoutbox._is_known_topic IS
    'Whether a worker, a retention rule, a coalesce key or one of the newest 10,000 messages has this topic. With a * at '
    'the end: whether a worker or such a message has a topic that begins so.';
