-- Begin a transaction of a transactional handler, and mark it: see _require_completion. Time limits of the role must not
-- end it while its handler waits, nor its statements: the timeout of the handler limits both. Other settings, such as
-- search_path, are the application's.
-- No query may be here: after it, the handler could not set the isolation level.
BEGIN ISOLATION LEVEL READ COMMITTED NOT DEFERRABLE;
SET LOCAL statement_timeout TO 0;
SET LOCAL lock_timeout TO 0;
SET LOCAL idle_in_transaction_session_timeout TO 0;
SET LOCAL pgoutbox.is_of_worker TO true
