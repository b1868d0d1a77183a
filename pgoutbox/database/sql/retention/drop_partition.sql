-- Drop a partition without kept messages; the answer is `dropped`, `kept`, `missing` or `busy`. A separate transaction:
-- its locks must be released at once.
SELECT pgoutbox._drop_partition(%(name)s::text) AS answer
