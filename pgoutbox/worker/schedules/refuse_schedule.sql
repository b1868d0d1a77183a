-- Note why the times of a schedule cannot be computed or enqueued, and look at it again later.
UPDATE pgoutbox.schedule AS s
SET problem = %(problem)s::text, retry_at = now() + interval '1 minute'
WHERE s.name = %(name)s::text AND s.revision = %(revision)s::integer AND s.next_at IS NOT DISTINCT FROM %(next_at)s::timestamptz
