-- The version of pgoutbox's schema in this database. Raises OB004 for a package that is too old.
SELECT pgoutbox._require_package(%(package)s::text)
