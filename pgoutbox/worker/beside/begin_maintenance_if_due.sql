-- Take the turn of maintenance if it is due. One row with the facts if this worker gets the turn,
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
\ir ../../database/sql/retention/_maintenance_facts.sql
CROSS JOIN elected
