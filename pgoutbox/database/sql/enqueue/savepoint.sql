-- Start of a best-effort enqueue in the caller's transaction. The name is pgoutbox's own, so that it never hides a
-- savepoint of the caller.
SAVEPOINT pgoutbox_best_effort
