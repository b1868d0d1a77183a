-- The redirects that are on, by source: 0 or 1 of an operator, and the workers whose environment has one. Their targets
-- are addresses, which are not for metrics.
SELECT s.source, count(v.target) AS count
FROM unnest('{operator,worker}'::text[]) AS s(source)
LEFT JOIN pgoutbox.redirect_view AS v ON v.source = s.source
GROUP BY s.source
ORDER BY s.source
