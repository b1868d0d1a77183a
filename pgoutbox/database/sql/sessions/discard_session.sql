-- End all that a handler has left in its session: settings, locks, temporary tables, prepared statements, listening.
DISCARD ALL
