-- Raise OB001 in a copy of the database: for the doctor, and for the sessions of transactional handlers.
SELECT pgoutbox._require_home(%(deployment)s::text)
