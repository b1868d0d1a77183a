-- The redirect that an operator has switched on; no row: none. A worker reads it at most once a second, and only while
-- it hands contents over.
SELECT r.target
FROM pgoutbox.redirect AS r
WHERE (r.until_at > now()) IS NOT FALSE
