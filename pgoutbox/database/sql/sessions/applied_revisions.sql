-- The revisions that were applied, by which package, and the digest of their files.
SELECT r.number, r.digest, r.applied_by
FROM pgoutbox.revision AS r
ORDER BY r.number
