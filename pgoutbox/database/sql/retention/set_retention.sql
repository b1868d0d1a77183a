-- Set the retention rule of a topic and state. A null duration keeps messages without a limit.
SELECT pgoutbox.set_retention(
    %(topic)s::text, %(state)s::text, make_interval(secs => %(keep_seconds)s::float8)
)
