"""Log events, metrics, traces, and the health of a worker."""
