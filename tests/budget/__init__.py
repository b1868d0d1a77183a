"""The budget: what one message costs, counted and not timed, at the surface: a worker process and its server."""
