-- The last message id, which bounds a bulk and a search by time.
SELECT p.last_id FROM pgoutbox.pulse_view AS p
