-- Commit the transaction of begin.sql.
COMMIT
