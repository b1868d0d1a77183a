-- Detach a partition without kept messages; the answer is `retired`, `kept`, `missing` or `busy`. A separate
-- transaction: its locks must be released at once.
SELECT pgoutbox._retire_partition(%(name)s::text) AS answer
