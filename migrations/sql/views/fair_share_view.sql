-- The shares of fair keys. The row of a queue with an empty key is for all of its keys without an own share. A row without
-- weight, limit and rate is no share: it remembers when the rate of its queue permits the key a whole turn again.
CREATE VIEW pgoutbox.fair_share_view AS
SELECT s.queue, s.fair_key, s.weight, s.max_in_flight, s.rate_count, s.rate_seconds, s.spent_at
FROM pgoutbox.fair_share AS s;
