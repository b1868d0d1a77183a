-- The redirect that an operator has switched on, and the blackout of today, or nulls. A worker reads them at most once a
-- second, and only while it hands contents over.
SELECT
    (SELECT r.target FROM pgoutbox.redirect AS r WHERE (r.until_at > now()) IS NOT FALSE) AS target,
    (SELECT min(b.name) FROM pgoutbox.blackout_view AS b WHERE b.is_on) AS blackout
