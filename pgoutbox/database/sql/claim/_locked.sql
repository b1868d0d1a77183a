-- The end of a CTE that chooses rows: take at most `total` of them, and lock them.
LIMIT %(total)s::bigint
-- Another claim may have locked a row. It is skipped, because a wait would fail with 40001 when the row moves to
-- another partition. One that has moved since the statement began fails it all the same, and the worker claims again.
FOR UPDATE OF m SKIP LOCKED
