-- Raise OB001 in a copy of the database, and OB004 for a package that is too old: for the doctor, and for the sessions of
-- transactional handlers.
SELECT pgoutbox._require_home(%(deployment)s::text, %(package)s::text)
