-- Failed messages by topic and cause that failed within `seconds`, or ever; with the numbers of all groups and messages.
-- Only the newest `cap` failed messages are read.
SELECT f.*, count(*) OVER () AS group_count, (sum(f.messages) OVER ())::bigint AS message_count
FROM pgoutbox.failures(
    since => coalesce(now() - make_interval(secs => %(seconds)s::float8), '-infinity'),
    topic => %(topic)s::text,
    newest => %(cap)s::bigint
) AS f
ORDER BY f.last_hour DESC, f.messages DESC, f.topic, f.cause
LIMIT %(limit)s::bigint
