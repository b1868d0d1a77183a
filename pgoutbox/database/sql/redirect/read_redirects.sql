-- The redirect that an operator has switched on, and the reports of workers, by name.
SELECT v.source, v.target, v.name, v.since, v.until_at, v.refused_within
FROM pgoutbox.redirect_view AS v
ORDER BY v.source, v.name
