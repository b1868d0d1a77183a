-- The queues of due messages that had to wait for these attempts, because they have the same coalesce key. The worker
-- wakes these queues. It runs this after the finish is committed: a claim before the commit found the attempts still in
-- flight.
WITH done AS (
    SELECT d.id, d.topic, d.coalesce_key
    FROM unnest(%(ids)s::bigint[], %(topics)s::text[], %(coalesce_keys)s::text[]) AS d(id, topic, coalesce_key)
)
SELECT m.queue
FROM done AS d
JOIN pgoutbox.coalesce_head AS head ON head.topic = d.topic AND head.coalesce_key = d.coalesce_key
JOIN pgoutbox.message_live AS m ON m.id = head.newest_id
WHERE head.newest_id <> d.id AND m.state = 'pending' AND m.available_at <= now()
-- By the rule `pending` an older message may wait too.
UNION
SELECT m.queue
FROM done AS d
JOIN pgoutbox.message_live AS m ON m.topic = d.topic AND m.coalesce_key = d.coalesce_key
WHERE m.coalesces_pending AND m.state = 'pending' AND m.available_at <= now() AND m.id <> d.id
