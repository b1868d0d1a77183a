-- End the pause of a schedule. False: it is missing or not paused.
SELECT pgoutbox.resume_schedule(%(name)s::text)
