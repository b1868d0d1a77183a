-- The last value of the id sequence and the newest message, to find a sequence that was set back. The snapshot is older
-- than the value of the sequence, so an id that is being enqueued is never ahead of it.
SELECT
    p.last_id,
    (SELECT max(m.id) FROM pgoutbox.message_view AS m) AS newest_id,
    s.seqcache AS cache_size
FROM pgoutbox.pulse_view AS p
CROSS JOIN pg_catalog.pg_sequence AS s
WHERE s.seqrelid = 'pgoutbox.message_id_seq'::regclass
