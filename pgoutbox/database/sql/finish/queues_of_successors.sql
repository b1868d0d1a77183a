-- The queues of due messages that had to wait for these attempts, because they have the same coalesce key. The worker
-- wakes these queues. It runs this after the finish is committed: a claim before the commit found the attempts still in
-- flight.
SELECT DISTINCT m.queue
FROM unnest(%(ids)s::bigint[], %(topics)s::text[], %(coalesce_keys)s::text[]) AS done(id, topic, coalesce_key)
JOIN pgoutbox.key_head AS head ON head.scope = done.topic AND head.key = done.coalesce_key
JOIN pgoutbox.message_live AS m ON m.id = head.newest_id
WHERE head.newest_id <> done.id AND m.state = 'pending' AND m.available_at <= now()
