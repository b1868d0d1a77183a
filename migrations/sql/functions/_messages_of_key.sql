-- The messages of a coalesce or ordering key, in its scope, for which its head is needed: those that are failed or
-- cancelled, and so can be redriven, and live ones with the ordering key. No index has the coalesce keys of live
-- messages. PostgreSQL inlines the body.
CREATE FUNCTION pgoutbox._messages_of_key(scope text, key text)
RETURNS SETOF bigint
LANGUAGE sql
STABLE
AS $function$
SELECT m.id
FROM pgoutbox.message_failed AS m
WHERE scope NOT LIKE '/%' AND m.topic = scope AND m.coalesce_key = key
UNION ALL
SELECT m.id
FROM pgoutbox.message_done AS m
WHERE scope NOT LIKE '/%' AND m.topic = scope AND m.coalesce_key = key AND m.state = 'cancelled'
UNION ALL
SELECT m.id
FROM pgoutbox.message_failed AS m
WHERE scope LIKE '/%' AND m.queue = substr(scope, 2) AND m.ordering_key = key
UNION ALL
SELECT m.id
FROM pgoutbox.message_done AS m
WHERE scope LIKE '/%' AND m.queue = substr(scope, 2) AND m.ordering_key = key AND m.state = 'cancelled'
UNION ALL
SELECT m.id
FROM pgoutbox.message_live AS m
WHERE scope LIKE '/%' AND m.queue = substr(scope, 2) AND m.ordering_key = key
$function$;
