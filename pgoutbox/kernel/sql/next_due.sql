-- When to poll each of these queues again. The worker asks before it sleeps. One row per queue, in the order of
-- `DueRow`.
-- Messages that were already due at the worker's last poll (`since_seconds`, `others_since_seconds` for retries and
-- leases) do not count. In a queue with limits they count, because the worker may have had no permit for them. Messages
-- behind an open breaker do not count, but its next probe does. Messages of a paused topic do not count, but the end of
-- the pause does.
WITH paused AS MATERIALIZED (
    -- The paused topics, and when the next pause ends. One that has ended since the last poll counts: the messages that it
    -- kept back are due.
    SELECT
        coalesce(array_agg(p.topic) FILTER (WHERE (p.resume_at > now()) IS NOT FALSE), '{}') AS topics,
        min(p.resume_at) FILTER (
            WHERE p.resume_at
                > now() - make_interval(secs => greatest(%(since_seconds)s::float8, %(others_since_seconds)s::float8))
        ) AS resume_at
    FROM pgoutbox.topic_pause AS p
), behind AS MATERIALIZED (
    -- The messages of each queue that are behind open breakers, and when the next of them may probe.
    SELECT
        split_part(held.hold, ' ', 1) AS queue,
        array_agg(held.hold) AS holds,
        min(greatest(b.retry_at, b.probe_until)) FILTER (
            WHERE split_part(held.hold, ' ', 2) = ANY (%(topics)s::text[])
                AND split_part(split_part(held.hold, ' ', 2), '@', 1) <> ALL (p.topics)
        ) AS probe_at
    FROM pgoutbox.breaker AS b
    CROSS JOIN LATERAL unnest(b.holds) AS held(hold)
    CROSS JOIN paused AS p
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
    END,
    -- Whether it has messages that wait for their turn.
    EXISTS (
        SELECT FROM pgoutbox.message_live AS w WHERE w.queue = asked.name AND w.lane = 2 AND w.ordering_key IS NULL OFFSET 0
    )
FROM (
    SELECT
        served.name,
        CASE WHEN q.name IS NOT NULL THEN coalesce(pgoutbox.next_permit_at(q.name), now()) END AS permit_at,
        behind.holds,
        behind.probe_at,
        p.topics AS paused_topics,
        p.resume_at,
        -- Later ones count even if they are behind a breaker or paused: at worst a poll a minute finds nothing. Otherwise
        -- this would read all of these scheduled messages.
        now() + interval '1 minute' AS soon,
        -- 1e9 seconds, about 32 years, stand for all time.
        now() - make_interval(secs => CASE WHEN q.name IS NULL THEN %(since_seconds)s::float8 ELSE 1e9 END) AS since,
        now() - make_interval(secs => CASE WHEN q.name IS NULL THEN %(others_since_seconds)s::float8 ELSE 1e9 END)
            AS others_since
    FROM unnest(%(queues)s::text[]) AS served(name)
    LEFT JOIN pgoutbox.queue AS q
        ON q.name = served.name AND num_nonnulls(q.paused_at, q.rate_count, q.max_in_flight) > 0
    LEFT JOIN behind ON behind.queue = served.name
    CROSS JOIN paused AS p
    -- OFFSET 0 keeps PostgreSQL from computing these expressions several times.
    OFFSET 0
) AS asked
CROSS JOIN LATERAL (
    SELECT
        least(
            asked.resume_at,
            (
                SELECT min(m.available_at)
                FROM pgoutbox.message_live AS m
                WHERE m.queue = asked.name AND m.lane = 0 AND m.state = 'pending' AND m.ordering_key IS NULL
                    AND m.available_at > asked.since
                    AND (
                        m.available_at > asked.soon
                        OR (
                            (
                                asked.holds IS NULL
                                OR pgoutbox._hold_of(m.queue, m.topic, m.payload_version, m.destination) <> ALL (asked.holds)
                            )
                            AND m.topic <> ALL (asked.paused_topics)
                        )
                    )
            ),
            (
                -- Those that wait for their turn. If one has been due, the worker knows that it waits.
                SELECT min(m.available_at)
                FROM pgoutbox.message_live AS m
                WHERE m.queue = asked.name AND m.lane = 2 AND m.state = 'pending' AND m.ordering_key IS NULL
                    AND m.available_at > now() - make_interval(secs => %(since_seconds)s::float8)
            ),
            (
                -- This includes messages behind others of their key: at worst one poll finds nothing.
                SELECT min(m.available_at)
                FROM pgoutbox.message_live AS m
                WHERE m.queue = asked.name AND m.state = 'pending' AND m.ordering_key IS NOT NULL
                    AND m.available_at > asked.since
                    AND (
                        m.available_at > asked.soon
                        OR (
                            (
                                asked.holds IS NULL
                                OR pgoutbox._hold_of(m.queue, m.topic, m.payload_version, m.destination) <> ALL (asked.holds)
                            )
                            AND m.topic <> ALL (asked.paused_topics)
                        )
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
                        m.available_at > asked.soon
                        OR (
                            (
                                asked.holds IS NULL
                                OR pgoutbox._hold_of(m.queue, m.topic, m.payload_version, m.destination) <> ALL (asked.holds)
                            )
                            AND m.topic <> ALL (asked.paused_topics)
                        )
                    )
            ),
            (
                SELECT min(c.lease_expires_at)
                FROM pgoutbox.claim AS c
                WHERE c.queue = asked.name AND c.lease_expires_at > asked.others_since
            )
        ) AS other_at
) AS due
