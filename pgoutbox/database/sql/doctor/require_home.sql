-- Fails like the session of a worker in a copy of the database.
SELECT pgoutbox._require_home(%(deployment)s::text)
