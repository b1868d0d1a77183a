-- The schedules whose times come next, those to be computed first, with the time of the server. Those of the code of other
-- applications are left to their workers.
SELECT s.name, s.rule, s.timezone, s.missed, s.revision, s.next_at, s.until_at, now() AS now
FROM pgoutbox.schedule AS s
WHERE s.paused_at IS NULL
    AND s.ended_at IS NULL
    AND s.problem IS NULL
    AND (NOT s.is_declared OR s.name = ANY (%(declared)s::text[]))
ORDER BY s.next_at NULLS FIRST
LIMIT 100
