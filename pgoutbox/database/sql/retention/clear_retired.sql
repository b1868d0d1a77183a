-- Delete the attempts and keys of a detached partition, `limit` messages at a time, and drop it after the last page.
-- No row: nothing is left to delete, or another session deletes it.
SELECT c.name, c.cleared_count, c.is_dropped
FROM pgoutbox._clear_retired(%(limit)s::integer) AS c
