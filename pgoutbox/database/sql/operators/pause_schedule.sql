-- Let the times of a schedule pass. False: it is missing or paused.
SELECT pgoutbox.pause_schedule(%(name)s::text)
