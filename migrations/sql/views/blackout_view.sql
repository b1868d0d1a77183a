-- The blackouts, and whether today is one of their days.
--
-- The clock, not the start of the transaction: an operator can open a transaction on the day before.
CREATE VIEW pgoutbox.blackout_view AS
SELECT
    b.first_day,
    b.last_day,
    b.time_zone,
    to_char(b.first_day, 'YYYY-MM-DD') || '/' || to_char(b.last_day, 'YYYY-MM-DD')
        || CASE b.time_zone WHEN 'UTC' THEN '' ELSE '[' || b.time_zone || ']' END AS name,
    (clock_timestamp() AT TIME ZONE b.time_zone)::date BETWEEN b.first_day AND b.last_day AS is_on
FROM pgoutbox.blackout AS b;
