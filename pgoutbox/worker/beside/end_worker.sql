-- This worker stops.
UPDATE pgoutbox.worker SET stopped_at = now(), redirect_to = NULL WHERE name = %(worker)s::text
