-- The numbers of a version of the package, to compare them. A pre-release counts as its release.
CREATE FUNCTION pgoutbox._release_of(version text)
RETURNS numeric[]
LANGUAGE sql
IMMUTABLE
PARALLEL SAFE
BEGIN ATOMIC
    SELECT string_to_array(substring(_release_of.version FROM '^[0-9]+(?:[.][0-9]+)*'), '.')::numeric[];
END;
