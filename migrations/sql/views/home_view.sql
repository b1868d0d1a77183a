-- The database that the schema belongs to, and whether it is this one. If not, it is a copy: workers send nothing.
CREATE VIEW pgoutbox.home_view AS
SELECT
    h.database_name,
    h.server_id,
    h.deployment,
    h.adopted_at,
    h.adopted_by,
    (h.server_id = here.server_id) IS NOT FALSE AND (h.database_id = here.database_id) IS NOT FALSE AS is_here
FROM pgoutbox.home AS h
CROSS JOIN pgoutbox._here() AS here;
