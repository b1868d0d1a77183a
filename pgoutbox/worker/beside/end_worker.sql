-- This worker stops.
UPDATE pgoutbox.worker SET stopped_at = now() WHERE name = %(worker)s::text
