-- When to poll each of these queues again. The worker asks before it sleeps. One row per queue, in the order of
-- `DueRow`.
-- Messages that were already due at the worker's last poll (`since_seconds`, `others_since_seconds` for retries and
-- leases) do not count. In a queue with limits they count, because the worker may have had no permit for them. Messages
-- behind an open breaker do not count, but its next probe does.
WITH behind AS MATERIALIZED (
    -- The messages of each queue that are behind open breakers, and when the next of them may probe.
    SELECT
        split_part(held.hold, ' ', 1) AS queue,
        array_agg(held.hold) AS holds,
        min(greatest(b.retry_at, b.probe_until)) FILTER (WHERE split_part(held.hold, ' ', 2) = ANY (%(topics)s::text[]))
            AS probe_at
    FROM pgoutbox.breaker AS b
    CROSS JOIN LATERAL unnest(b.holds) AS held(hold)
    GROUP BY split_part(held.hold, ' ', 1)
)
SELECT
    asked.name,
    -- Whether the queue has messages with an ordering key. Without OFFSET 0, PostgreSQL may read those of all queues.
    EXISTS (SELECT FROM pgoutbox.message_live AS o WHERE o.queue = asked.name AND o.ordering_key IS NOT NULL OFFSET 0),
    -- Seconds until the next attempt may begin; null for a queue that is not paused and has no limits.
    CASE WHEN asked.permit_at = 'infinity' THEN 'infinity' ELSE extract(epoch FROM asked.permit_at - now())::float8 END,
    -- Seconds until the next message falls due, null if there is none: fresh and ordered ones, then retries and leases.
    extract(epoch FROM due.first_at - now())::float8,
    extract(epoch FROM due.other_at - now())::float8,
    -- Seconds until the next probe of a breaker with messages of this queue, null if there is none.
    CASE
        WHEN asked.probe_at IS NOT NULL AND asked.permit_at IS DISTINCT FROM 'infinity'
            THEN extract(epoch FROM greatest(asked.probe_at, asked.permit_at) - now())::float8
    END
FROM (
    SELECT
        served.name,
        CASE WHEN q.name IS NOT NULL THEN coalesce(pgoutbox.next_permit_at(q.name), now()) END AS permit_at,
        behind.holds,
        behind.probe_at,
        -- Later ones count even if they are behind a breaker: at worst a poll a minute finds nothing. Otherwise this would
        -- read all scheduled messages behind it.
        now() + interval '1 minute' AS soon,
        -- 1e9 seconds, about 32 years, stand for all time.
        now() - make_interval(secs => CASE WHEN q.name IS NULL THEN %(since_seconds)s::float8 ELSE 1e9 END) AS since,
        now() - make_interval(secs => CASE WHEN q.name IS NULL THEN %(others_since_seconds)s::float8 ELSE 1e9 END)
            AS others_since
    FROM unnest(%(queues)s::text[]) AS served(name)
    LEFT JOIN pgoutbox.queue AS q
        ON q.name = served.name AND num_nonnulls(q.paused_at, q.rate_count, q.max_in_flight) > 0
    LEFT JOIN behind ON behind.queue = served.name
    -- OFFSET 0 keeps PostgreSQL from computing these expressions several times.
    OFFSET 0
) AS asked
CROSS JOIN LATERAL (
    SELECT
        least(
            (
                SELECT min(m.available_at)
                FROM pgoutbox.message_live AS m
                WHERE m.queue = asked.name AND m.lane = 0 AND m.state = 'pending' AND m.ordering_key IS NULL
                    AND m.available_at > asked.since
                    AND (
                        asked.holds IS NULL OR m.available_at > asked.soon
                        OR pgoutbox._hold_of(m.queue, m.topic, m.destination) <> ALL (asked.holds)
                    )
            ),
            (
                -- This includes messages behind others of their key: at worst one poll finds nothing.
                SELECT min(m.available_at)
                FROM pgoutbox.message_live AS m
                WHERE m.queue = asked.name AND m.state = 'pending' AND m.ordering_key IS NOT NULL
                    AND m.available_at > asked.since
                    AND (
                        asked.holds IS NULL OR m.available_at > asked.soon
                        OR pgoutbox._hold_of(m.queue, m.topic, m.destination) <> ALL (asked.holds)
                    )
                    -- Always true: it permits the index message_live_ordered_due.
                    AND m.available_at > '-infinity'
            )
        ) AS first_at,
        least(
            (
                SELECT min(m.available_at)
                FROM pgoutbox.message_live AS m
                WHERE m.queue = asked.name AND m.lane = 1 AND m.state = 'pending' AND m.ordering_key IS NULL
                    AND m.available_at > asked.others_since
                    AND (
                        asked.holds IS NULL OR m.available_at > asked.soon
                        OR pgoutbox._hold_of(m.queue, m.topic, m.destination) <> ALL (asked.holds)
                    )
            ),
            (
                SELECT min(c.lease_expires_at)
                FROM pgoutbox.claim AS c
                WHERE c.queue = asked.name AND c.lease_expires_at > asked.others_since
            )
        ) AS other_at
) AS due
