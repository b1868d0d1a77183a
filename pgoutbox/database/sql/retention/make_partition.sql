-- Make the next partition of finished messages if one is missing. A separate transaction: its locks must be released at
-- once.
SELECT pgoutbox.make_partition() AS name
