-- The server's clock, in seconds since 1970.
SELECT extract(epoch FROM clock_timestamp())::float8 AS seconds
