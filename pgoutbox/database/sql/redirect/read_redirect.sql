-- The redirect that an operator has switched on, and the blackout of today, or nulls. A worker reads them at most once a
-- second, and only while it hands contents over.
SELECT r.target, r.topics, r.exempt_topics, r.blackout
FROM pgoutbox._read_redirect() AS r
