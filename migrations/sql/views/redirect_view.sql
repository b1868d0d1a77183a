-- The redirect that an operator has switched on, and the redirects that workers have reported.
CREATE VIEW pgoutbox.redirect_view AS
SELECT
    'operator' AS source,
    r.target,
    r.set_by AS name,
    r.set_at AS since,
    r.until_at,
    r.topics,
    r.exempt_topics
FROM pgoutbox.redirect AS r
WHERE (r.until_at > now()) IS NOT FALSE
UNION ALL
SELECT
    'worker',
    w.redirect_to,
    w.name,
    w.seen_at,
    NULL,
    NULL,
    NULL
FROM pgoutbox.worker AS w
-- The last run says nothing about the next one.
WHERE w.redirect_to IS NOT NULL AND w.ended_at IS NULL AND w.seen_at > now() - interval '3 minutes';
