-- The time until which retention rules keep messages of a partition. The years 2000 and 9000 stand for the infinities,
-- which Python's datetime does not have.
SELECT
    greatest(
        least(
            pgoutbox._kept_until(%(lower_at)s::timestamptz, %(upper_at)s::timestamptz), timestamptz '9000-01-01 00:00Z'
        ),
        timestamptz '2000-01-01 00:00Z'
    ) AS kept_until
