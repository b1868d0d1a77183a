-- The time of the database's clock.
SELECT clock_timestamp()
