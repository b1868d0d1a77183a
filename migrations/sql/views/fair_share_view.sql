-- The shares of fair keys. The row of a queue with an empty key is for all of its keys without an own row.
CREATE VIEW pgoutbox.fair_share_view AS
SELECT s.queue, s.fair_key, s.weight, s.max_in_flight
FROM pgoutbox.fair_share AS s;
