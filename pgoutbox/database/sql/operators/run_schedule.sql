-- Enqueue the message of a schedule now. Null: it is missing.
SELECT pgoutbox.run_schedule(%(name)s::text)
