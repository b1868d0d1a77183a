-- The version of pgoutbox's schema in this database.
SELECT pgoutbox.schema_version()
