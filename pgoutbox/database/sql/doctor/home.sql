-- The database that the schema belongs to.
SELECT h.database_name, h.deployment
FROM pgoutbox.home_view AS h
