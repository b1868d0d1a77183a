-- The facts that decide the work of a turn of maintenance, in the order of `MaintenanceFacts`.
SELECT
    now() AS asked_at,
    pg_relation_size('pgoutbox.message_done_default') AS default_bytes,
    p.names,
    p.lowers_at,
    p.uppers_at,
    r.topics,
    r.states,
    r.keeps_seconds
FROM (
    SELECT
        array_agg(p.name ORDER BY p.lower_at) AS names,
        array_agg(p.lower_at ORDER BY p.lower_at) AS lowers_at,
        array_agg(p.upper_at ORDER BY p.lower_at) AS uppers_at
    FROM pgoutbox.partitions() AS p
) AS p
CROSS JOIN (
    SELECT
        array_agg(r.topic ORDER BY r.topic = '*', r.topic, r.state) AS topics,
        array_agg(r.state ORDER BY r.topic = '*', r.topic, r.state) AS states,
        array_agg(extract(epoch FROM r.keep)::float8 ORDER BY r.topic = '*', r.topic, r.state) AS keeps_seconds
    FROM pgoutbox.retention AS r
) AS r
