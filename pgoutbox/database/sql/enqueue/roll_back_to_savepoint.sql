-- End of a best-effort enqueue that failed: the caller's transaction remains usable.
ROLLBACK TO SAVEPOINT pgoutbox_best_effort
