-- Let the workers of this deployment send from this database.
SELECT pgoutbox.adopt(%(deployment)s::text)
