-- Set the share of a fair key or of a queue, or without any value the usual one. False: nothing changes.
SELECT pgoutbox.set_fair_share(
    %(queue)s::text, %(fair_key)s::text, %(weight)s::integer, %(max_in_flight)s::integer, %(rate_count)s::integer,
    %(rate_seconds)s::integer, %(remove)s::text[]
)
