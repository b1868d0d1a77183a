-- Up to `limit` fair keys of a queue that begin with a prefix, those that wait longest first, but before them the key that is
-- the prefix. `key_count` is the number of all of them, among the first `keys`. Messages are counted up to `cap`.
WITH RECURSIVE visited(key, number) AS (
    SELECT '' COLLATE "C", 0
    UNION ALL
    -- This leaps along three indexes to the next key that waits, has its turn or has a share.
    SELECT next.key, v.number + 1
    FROM visited AS v
    CROSS JOIN LATERAL (
        SELECT min(one.key) AS key
        FROM (
            (
                SELECT m.fair_key FROM pgoutbox.message_view AS m
                WHERE m.queue = %(queue)s::text AND m.lane = 2 AND m.state IN ('pending', 'sending')
                    AND m.fair_key > v.key AND m.fair_key >= %(prefix)s::text
                ORDER BY m.fair_key LIMIT 1
            )
            UNION ALL
            (
                SELECT m.fair_key FROM pgoutbox.message_view AS m
                WHERE m.queue = %(queue)s::text AND m.lane < 2 AND m.state IN ('pending', 'sending')
                    AND m.fair_key > v.key AND m.fair_key >= %(prefix)s::text
                ORDER BY m.fair_key LIMIT 1
            )
            UNION ALL
            (
                SELECT s.fair_key FROM pgoutbox.fair_share_view AS s
                WHERE s.queue = %(queue)s::text AND s.fair_key > v.key AND s.fair_key >= %(prefix)s::text
                    AND num_nonnulls(s.weight, s.max_in_flight, s.rate_count) > 0
                ORDER BY s.fair_key LIMIT 1
            )
        ) AS one(key)
    ) AS next
    WHERE starts_with(next.key, %(prefix)s::text) AND v.number < %(keys)s::bigint
), longest AS MATERIALIZED (
    SELECT v.key, due.oldest_at, count(*) OVER () AS key_count
    FROM visited AS v
    CROSS JOIN LATERAL (
        SELECT (
            SELECT m.available_at FROM pgoutbox.message_view AS m
            WHERE m.queue = %(queue)s::text AND m.fair_key = v.key AND m.lane = 2
                AND m.state IN ('pending', 'sending') AND m.available_at <= now()
            ORDER BY m.available_at LIMIT 1
        )
    ) AS due(oldest_at)
    WHERE v.number > 0
    ORDER BY v.key <> %(prefix)s::text, due.oldest_at, v.key
    LIMIT %(limit)s::bigint
)
SELECT
    l.key,
    (
        SELECT count(*)
        FROM (
            SELECT FROM pgoutbox.message_view AS m
            WHERE m.queue = %(queue)s::text AND m.fair_key = l.key AND m.lane = 2
                AND m.state IN ('pending', 'sending') AND m.available_at <= now()
            LIMIT %(cap)s::bigint
        ) AS one
    ) AS due,
    (
        SELECT count(*)
        FROM (
            SELECT FROM pgoutbox.message_view AS m
            WHERE m.queue = %(queue)s::text AND m.fair_key = l.key AND m.lane < 2 AND m.state IN ('pending', 'sending')
            LIMIT %(cap)s::bigint
        ) AS one
    ) AS in_flight,
    l.oldest_at AS oldest_due_at,
    extract(epoch FROM now() - l.oldest_at)::float8 AS oldest_due_seconds,
    share.*,
    -- As in _give_turns. Null: now.
    CASE WHEN share.rate_count IS NOT NULL THEN (
        SELECT p.permit_at
        FROM (
            SELECT own.spent_at - (share.weight - 1) * (share.rate_seconds * interval '1 s' / share.rate_count)
        ) AS p(permit_at)
        WHERE p.permit_at > now()
    ) END AS next_turn_at,
    l.key_count
FROM longest AS l
LEFT JOIN pgoutbox.fair_share_view AS own ON own.queue = %(queue)s::text AND own.fair_key = l.key
LEFT JOIN pgoutbox.fair_share_view AS common ON common.queue = %(queue)s::text AND common.fair_key = ''
CROSS JOIN LATERAL (
    SELECT
        coalesce(own.weight, common.weight, 1) AS weight,
        coalesce(own.max_in_flight, common.max_in_flight) AS max_in_flight,
        coalesce(own.rate_count, common.rate_count) AS rate_count,
        CASE WHEN own.rate_count IS NULL THEN common.rate_seconds ELSE own.rate_seconds END AS rate_seconds
) AS share
ORDER BY l.key <> %(prefix)s::text, l.oldest_at, l.key
