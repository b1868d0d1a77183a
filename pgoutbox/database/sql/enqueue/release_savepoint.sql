-- End of a best-effort enqueue that succeeded.
RELEASE SAVEPOINT pgoutbox_best_effort
