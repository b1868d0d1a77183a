-- End all that a handler has left in its session.
SELECT pgoutbox._reset_session()
