-- Whether each statement of the transaction sees what others have committed until then. PostgreSQL treats READ
-- UNCOMMITTED like READ COMMITTED. PostgreSQL inlines the body.
CREATE FUNCTION pgoutbox._reads_committed()
RETURNS boolean
LANGUAGE sql
STABLE
RETURN current_setting('transaction_isolation') IN ('read committed', 'read uncommitted');
