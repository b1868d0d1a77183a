-- The workers that hold messages, report their presence or are connected, and the last run. Only members of
-- pg_read_all_stats see connections of other roles.
WITH held AS (
    SELECT
        m.worker,
        count(*) AS in_flight,
        count(*) FILTER (WHERE m.lease_expires_at <= now()) AS expired_leases,
        min(m.claimed_at) AS oldest_claimed_at,
        min(m.lease_expires_at) AS lease_expires_at,
        array_agg(DISTINCT m.queue) AS queues
    FROM pgoutbox.in_flight_view AS m
    GROUP BY m.worker
), known AS (
    SELECT
        coalesce(v.name, h.worker) AS worker,
        coalesce(h.in_flight, 0) AS in_flight,
        coalesce(h.expired_leases, 0) AS expired_leases,
        h.oldest_claimed_at,
        h.lease_expires_at,
        coalesce(v.queues, h.queues) AS queues,
        coalesce(v.topics, '{}') AS topics,
        v.seen_at,
        v.ended_at
    FROM held AS h
    FULL JOIN pgoutbox.worker_view AS v ON v.name = h.worker
), connected AS (
    SELECT
        substr(a.application_name, 16) AS name,
        min(a.backend_start) AS connected_at,
        min(host(a.client_addr)) AS address
    FROM pg_catalog.pg_stat_activity AS a
    WHERE a.datname = current_database() AND starts_with(a.application_name, 'pgoutbox claim ')
    GROUP BY a.application_name
)
SELECT
    coalesce(k.worker, c.name) AS worker,
    coalesce(k.in_flight, 0) AS in_flight,
    coalesce(k.expired_leases, 0) AS expired_leases,
    k.oldest_claimed_at,
    k.lease_expires_at,
    coalesce(k.queues, '{}') AS queues,
    coalesce(k.topics, '{}') AS topics,
    k.seen_at,
    k.ended_at,
    c.connected_at,
    c.address
FROM known AS k
-- The name of a connection has only the last 48 characters of the worker's name.
FULL JOIN connected AS c ON c.name = right(k.worker, 48)
ORDER BY 1
