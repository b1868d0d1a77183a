-- Messages of the given queues that have been due for longer than `seconds`, by queue, with the possible reasons, those that
-- are late for longest first. The queues share `rows`, of each lane, so that a backlog of one hides no other, and a large
-- backlog has the findings of a small one. A number of messages is exact unless `is_capped`.
WITH holds AS MATERIALIZED (
    SELECT b.key, held.hold
    FROM pgoutbox.breaker_view AS b
    CROSS JOIN LATERAL unnest(b.holds) AS held(hold)
), late AS MATERIALIZED (
    SELECT
        named.queue,
        now() - make_interval(secs => %(seconds)s::float8) AS until_at,
        -- At most a tenth, so that the numbers of the others do not grow when one of a few queues is repaired.
        least(%(rows)s::bigint / 10, %(rows)s::bigint / count(*) OVER ()) AS rows
    FROM unnest(%(names)s::text[]) AS named(queue)
), shared AS MATERIALIZED (
    -- Those whose fair key gets no turn. The view is read once for all.
    SELECT w.id
    FROM pgoutbox.waiting_view AS w
    WHERE w.reason = 'share'
        AND w.id = ANY (
            ARRAY(
                SELECT turn.id
                FROM late AS l
                CROSS JOIN LATERAL (
                    SELECT m.id FROM pgoutbox.message_view AS m
                    WHERE m.queue = l.queue AND m.lane = 2 AND m.state = 'pending' AND m.ordering_key IS NULL
                        AND m.available_at < l.until_at
                    ORDER BY m.available_at LIMIT l.rows
                ) AS turn
            )
        )
), counted AS (
    SELECT
        l.queue,
        found.*
    FROM late AS l
    CROSS JOIN LATERAL (
        SELECT
            count(*) AS messages,
            min(one.available_at) AS oldest_at,
            coalesce(max(one.number) >= l.rows, false) AS is_capped,
            coalesce(
                array_agg(DISTINCT one.handled_as) FILTER (WHERE one.halted_by IS NULL AND NOT one.is_behind), '{}'
            ) AS topics,
            count(*) FILTER (WHERE one.halted_by IS NOT NULL) AS halted,
            count(*) FILTER (WHERE one.halted_by IS NULL AND NOT one.is_behind) AS free,
            mode() WITHIN GROUP (ORDER BY one.breaker) AS breaker,
            count(one.breaker) AS held,
            coalesce(array_agg(DISTINCT one.topic) FILTER (WHERE one.is_paused), '{}') AS paused_topics,
            count(*) FILTER (WHERE one.is_paused AND one.halted_by IS NULL AND NOT one.is_behind) AS paused,
            count(*) FILTER (WHERE one.is_shared) AS shared,
            min(one.halted_by) AS halted_by
        FROM (
            SELECT
                m.topic,
                pgoutbox._handled_as(m.topic, m.payload_version) AS handled_as,
                m.available_at,
                m.topic IN (SELECT p.topic FROM pgoutbox.topic_pause_view AS p) AS is_paused,
                m.id IN (SELECT s.id FROM shared AS s) AS is_shared,
                -- Only while a breaker is open is the destination read: the view redacts it, which is slow for many rows.
                CASE WHEN EXISTS (SELECT FROM holds) THEN (
                    SELECT min(h.key)
                    FROM pgoutbox.message_view AS sent
                    JOIN holds AS h
                        ON h.hold = pgoutbox._hold_of(sent.queue, sent.topic, sent.payload_version, sent.destination)
                    WHERE sent.state = 'pending' AND sent.id = m.id
                ) END AS breaker,
                CASE WHEN m.ordering_key IS NOT NULL THEN (
                    SELECT min(f.id)
                    FROM pgoutbox.message_view AS f
                    WHERE f.state = 'failed'
                        AND f.queue = l.queue
                        AND f.ordering_key = m.ordering_key
                        AND f.halts_key
                        AND f.id < m.id
                ) END AS halted_by,
                m.ordering_key IS NOT NULL AND EXISTS (
                    SELECT
                    FROM pgoutbox.message_view AS earlier
                    WHERE earlier.state IN ('pending', 'sending')
                        AND earlier.queue = l.queue
                        AND earlier.ordering_key = m.ordering_key
                        AND earlier.id < m.id
                ) AS is_behind,
                count(*) OVER (PARTITION BY m.part) AS number
            FROM (
                \ir _pending.sql
            ) AS m
        ) AS one
    ) AS found
)
SELECT
    c.*,
    extract(epoch FROM now() - c.oldest_at)::float8 AS oldest_seconds,
    b.last_error,
    extract(epoch FROM now() - b.opened_at)::float8 AS open_seconds,
    q.is_paused,
    q.rate_count,
    q.rate_seconds,
    EXISTS (
        SELECT
        FROM pgoutbox.in_flight_view AS held
        WHERE held.queue = c.queue AND held.lease_expires_at > now()
    ) AS is_worked,
    q.tokens,
    q.max_in_flight,
    CASE WHEN q.max_in_flight IS NOT NULL THEN q.in_flight END AS in_flight
FROM counted AS c
LEFT JOIN pgoutbox.queue_view AS q ON q.name = c.queue
LEFT JOIN pgoutbox.breaker_view AS b ON b.key = c.breaker
WHERE c.messages > 0
ORDER BY c.oldest_at, c.queue
