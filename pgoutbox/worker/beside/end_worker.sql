-- This worker stops.
DELETE FROM pgoutbox.worker WHERE name = %(worker)s::text
