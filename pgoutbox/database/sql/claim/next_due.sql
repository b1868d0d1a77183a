-- When to poll each of these queues again. The worker asks before it sleeps. One row per queue, in the order of
-- `DueRow`, then the horizon of the answer (`Horizon`).
-- Messages that were already due at the worker's last poll (`since_seconds`, `others_since_seconds` for retries and
-- leases) do not count. In a queue with limits they count, because the worker may have had no permit for them.
SELECT
    asked.name,
    -- Whether the queue has messages with an ordering key.
    EXISTS (SELECT FROM pgoutbox.message_live AS o WHERE o.queue = asked.name AND o.ordering_key IS NOT NULL),
    -- Seconds until the next attempt may begin; null for a queue that is not paused and has no limits.
    CASE WHEN asked.permit_at = 'infinity' THEN 'infinity' ELSE extract(epoch FROM asked.permit_at - now())::float8 END,
    -- Seconds until the next message falls due, null if there is none: fresh and ordered ones, then retries and leases.
    extract(epoch FROM due.first_at - now())::float8,
    extract(epoch FROM due.other_at - now())::float8,
    -- The horizon: server start, oldest open transaction, next transaction id, last message id. Every transaction that
    -- enqueues has its id before it draws the ids of its messages. So all messages up to the last message id are
    -- visible to any later snapshot in which no transaction before that next one is open.
    pg_postmaster_start_time(),
    asked.xmin,
    -- The next transaction id. The xmax of a snapshot is not that, because it counts completed transactions only. age()
    -- counts from the next id, modulo 2^32.
    asked.xmin + ((3 + age('3'::xid) - asked.xmin) & 4294967295),
    coalesce(pg_sequence_last_value('pgoutbox.message_id_seq'), 0)
FROM (
    SELECT
        served.name,
        CASE WHEN q.name IS NOT NULL THEN coalesce(pgoutbox.next_permit_at(q.name), now()) END AS permit_at,
        -- 1e9 seconds, about 32 years, stand for all time.
        now() - make_interval(secs => CASE WHEN q.name IS NULL THEN %(since_seconds)s::float8 ELSE 1e9 END) AS since,
        now() - make_interval(secs => CASE WHEN q.name IS NULL THEN %(others_since_seconds)s::float8 ELSE 1e9 END)
            AS others_since,
        pg_snapshot_xmin(pg_current_snapshot())::text::bigint AS xmin
    FROM unnest(%(queues)s::text[]) AS served(name)
    LEFT JOIN pgoutbox.queue AS q
        ON q.name = served.name AND num_nonnulls(q.paused_at, q.rate_count, q.max_in_flight) > 0
    -- OFFSET 0 keeps PostgreSQL from computing these expressions several times.
    OFFSET 0
) AS asked
CROSS JOIN LATERAL (
    SELECT
        least(
            (
                SELECT min(m.available_at)
                FROM pgoutbox.message_live AS m
                WHERE m.queue = asked.name AND m.attempt_count = 0 AND m.ordering_key IS NULL
                    AND m.available_at > asked.since
                    -- Due messages beyond seen_id do not count either: claim_new.sql claims them.
                    AND (m.id <= %(seen_id)s::bigint OR m.available_at > now() OR asked.permit_at IS NOT NULL)
            ),
            (
                -- This includes messages behind others of their key: at worst one poll finds nothing.
                SELECT min(m.available_at)
                FROM pgoutbox.message_live AS m
                WHERE m.queue = asked.name AND m.state = 'pending' AND m.ordering_key IS NOT NULL
                    AND m.available_at > asked.since
            )
        ) AS first_at,
        least(
            (
                SELECT min(m.available_at)
                FROM pgoutbox.message_live AS m
                WHERE m.queue = asked.name AND m.state = 'pending' AND m.attempt_count > 0 AND m.ordering_key IS NULL
                    AND m.available_at > asked.others_since
            ),
            (
                SELECT min(m.lease_expires_at)
                FROM pgoutbox.message_live AS m
                WHERE m.queue = asked.name AND m.state = 'sending' AND m.lease_expires_at > asked.others_since
            )
        ) AS other_at
) AS due
