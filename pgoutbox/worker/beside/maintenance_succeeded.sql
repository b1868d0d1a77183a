-- Record that a turn of maintenance ended without an error. Monitoring reads the time.
UPDATE pgoutbox.maintenance_run SET succeeded_at = clock_timestamp()
