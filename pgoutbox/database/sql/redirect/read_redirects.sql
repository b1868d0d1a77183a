-- The redirect that an operator has switched on, and the reports of workers, by name; and the blackout of today.
SELECT v.source, v.target, v.name, v.since, v.until_at, v.topics, v.exempt_topics
FROM pgoutbox.redirect_view AS v
UNION ALL
SELECT 'blackout', NULL, min(b.name), NULL, NULL, NULL, NULL
FROM pgoutbox.blackout_view AS b
WHERE b.is_on
HAVING count(*) > 0
ORDER BY 1, 3
