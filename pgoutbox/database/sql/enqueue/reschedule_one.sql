-- Make a pending message due at a time, or at once, in the caller's transaction.
SELECT r.result
FROM pgoutbox.reschedule(
    ids => ARRAY[%s::pg_catalog.int8],
    available_at => greatest(
        %s::pg_catalog.timestamptz,
        pg_catalog.now() OPERATOR(pg_catalog.+) pg_catalog.make_interval(secs => %s::pg_catalog.float8)
    )
) AS r
