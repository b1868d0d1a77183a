-- The redirect that an operator has switched on, and the blackout of today, or nulls. A worker reads them at most once a
-- second, and only while it hands contents over. One row: a target never meets the topics of another redirect.
SELECT r.target, r.topics, r.exempt_topics, b.blackout
FROM (SELECT min(v.name) AS blackout FROM pgoutbox.blackout_view AS v WHERE v.is_on) AS b
LEFT JOIN pgoutbox.redirect AS r ON (r.until_at > now()) IS NOT FALSE
