-- _locked.sql for a queue that may be paused or have limits: take at most as many rows as it has permits.
-- _permits() locks the row of a limited queue until the commit. A claim that does not get it has no permits.
LIMIT pgoutbox._permits(%(queue)s::text, %(total)s::bigint)
-- Locked rows are skipped for the reason in _locked.sql.
FOR UPDATE OF m SKIP LOCKED
