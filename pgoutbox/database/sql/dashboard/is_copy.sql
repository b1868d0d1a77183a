-- Whether the schema belongs to another database, so that workers send nothing.
SELECT NOT EXISTS (SELECT FROM pgoutbox.home_view AS h WHERE h.is_here)
