-- Begin a transaction of a worker behind a pooler. Its isolation level must not depend on the role's default: the
-- claims and finishes rely on a new snapshot for each statement.
BEGIN ISOLATION LEVEL READ COMMITTED
