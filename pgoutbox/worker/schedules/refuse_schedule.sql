-- Note why the times of a schedule cannot be computed, until it is changed.
UPDATE pgoutbox.schedule AS s
SET problem = %(problem)s::text
WHERE s.name = %(name)s::text AND s.revision = %(revision)s::integer
