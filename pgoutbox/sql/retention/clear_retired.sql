-- Delete the rest of a detached partition in steps of `limit` rows, and drop it at the end. One row per partition.
SELECT c.name, c.cleared_count, c.is_dropped
FROM pgoutbox.clear_retired(%(limit)s::integer) AS c
