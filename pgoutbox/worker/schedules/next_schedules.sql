-- The schedules to look at next, those to be computed first, with the time of the server. Those of the code of other
-- applications are left to their workers.
SELECT
    s.name, s.rule, s.timezone, s.missed, s.revision, s.next_at, s.until_at, s.changed_at,
    coalesce(s.retry_at, s.next_at) AS look_at, s.problem, now() AS now
FROM pgoutbox.schedule AS s
WHERE s.paused_at IS NULL
    AND s.ended_at IS NULL
    AND (NOT s.is_declared OR s.name = ANY (%(declared)s::text[]))
ORDER BY coalesce(s.retry_at, s.next_at) NULLS FIRST
LIMIT 100
