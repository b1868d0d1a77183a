-- Take the turn of maintenance if it is due. One row with the facts of maintenance_facts.sql if this worker gets the turn,
-- otherwise none. Every worker runs it periodically; without the turn, it runs only this statement.
WITH elected AS MATERIALIZED (
    -- The worker whose write changes the time of the next turn has the turn: all others find it changed, and get no
    -- row.
    INSERT INTO pgoutbox.maintenance_run AS u (due_at, began_at, worker)
    VALUES (
        clock_timestamp() + make_interval(secs => %(interval_seconds)s::float8),
        clock_timestamp(),
        %(worker)s::text
    )
    ON CONFLICT ON CONSTRAINT maintenance_run_pkey DO UPDATE
    SET due_at = excluded.due_at,
        began_at = excluded.began_at,
        worker = excluded.worker
    -- If a turn began in the future, the clock was ahead: the next turn is due at once, and not at that time.
    WHERE u.due_at <= clock_timestamp() OR u.began_at > clock_timestamp()
    RETURNING u.worker
)
-- The same columns as in maintenance_facts.sql.
SELECT
    now() AS asked_at,
    pg_relation_size('pgoutbox.message_done_default') AS default_bytes,
    EXISTS (SELECT FROM pgoutbox.retired) AS has_retired,
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
CROSS JOIN elected
