-- Write a schedule of the code, unless it is there already.
SELECT pgoutbox.set_schedule(
    %(name)s::text,
    %(rule)s::text,
    %(message)s::jsonb,
    %(timezone)s::text,
    %(missed)s::text,
    make_interval(secs => %(jitter_seconds)s::float8),
    %(until_at)s::timestamptz,
    is_declared => true
)
