-- Enqueue the messages of a schedule for these times, and write its next time.
SELECT pgoutbox._tick_schedule(
    %(name)s::text,
    %(revision)s::integer,
    %(known_next_at)s::timestamptz,
    %(times)s::timestamptz[],
    %(next_at)s::timestamptz
)
