-- The version of this schema; workers refuse an older one than they need.
CREATE FUNCTION pgoutbox.schema_version()
RETURNS integer
LANGUAGE sql
IMMUTABLE
PARALLEL SAFE
AS 'SELECT 1';
