-- Stop receiving notifications, before the connection closes or returns to its pool.
UNLISTEN pgoutbox
