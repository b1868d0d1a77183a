CREATE VIEW pgoutbox.redirect_view AS
SELECT
    'operator' AS source,
    r.target,
    r.set_by AS name,
    r.set_at AS since,
    r.until_at
FROM pgoutbox.redirect AS r
WHERE (r.until_at > now()) IS NOT FALSE
UNION ALL
SELECT
    'worker',
    w.target,
    w.worker,
    w.reported_at,
    NULL
FROM pgoutbox.redirect_report AS w
-- A worker reports every 20 seconds.
WHERE w.reported_at > now() - interval '90 seconds';

COMMENT ON VIEW pgoutbox.redirect_view IS
    'The redirect that an operator has switched on, and the redirects that workers have reported.';
