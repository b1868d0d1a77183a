-- The estimated number of finished messages, as of the last VACUUM or ANALYZE of each partition. No row for a partition
-- that never had one.
SELECT e.state, e.messages FROM pgoutbox._done_estimate() AS e
