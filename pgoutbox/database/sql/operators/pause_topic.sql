-- Pause a topic, for `seconds` or until it is resumed.
SELECT p.paused_at, p.resume_at
FROM pgoutbox.pause_topic(%(topic)s::text, make_interval(secs => %(seconds)s::float8)) AS p
