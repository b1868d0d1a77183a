-- _locked.sql for a queue that may be paused or have limits: take at most as many rows as it has permits.
-- _permits() locks the row of a limited queue until the commit, so that its claims run one after the other.
LIMIT pgoutbox._permits(%(queue)s::text, %(total)s::bigint)
-- Locked rows are skipped for the reason in _locked.sql.
FOR UPDATE OF m SKIP LOCKED
