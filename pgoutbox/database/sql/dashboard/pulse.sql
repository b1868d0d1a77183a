-- Cheap counters of which one changes with nearly every change of a page. The statistics of the tables are up to a
-- second late; they count written rows of any kind.
SELECT p.last_id, p.last_act, p.in_flight, p.live, p.failed, p.breakers, p.written
FROM pgoutbox.pulse_view AS p
