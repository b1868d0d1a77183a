-- Lock the messages that an act may change: those in one of the states, and still at these numbers of attempts. A message
-- can be tried again, and fail with another error, between the query of a filter and the act. With `only_newest`, one that
-- is superseded is left alone, and with `due_at` one that would expire before. Returns a row for each id. The result is
-- null for a message that the act has to change. Nobody else can change it until the commit.
CREATE FUNCTION pgoutbox._choose(
    ids bigint[],
    states text[],
    attempt_counts integer[] DEFAULT NULL,
    only_newest boolean DEFAULT false,
    due_at timestamptz DEFAULT NULL
)
RETURNS pgoutbox.act_result[]
LANGUAGE plpgsql
AS $function$
DECLARE
    locked bigint[] := CASE WHEN 'pending' = ANY (states) THEN pgoutbox._lock_pending(ids) ELSE '{}' END;
BEGIN
    locked := locked || ARRAY(
        SELECT m.id
        FROM unnest(ids, attempt_counts) AS a(id, attempt_count)
        JOIN pgoutbox.message AS m ON m.id = a.id
        WHERE m.state = ANY (states)
            AND m.state IN ('failed', 'cancelled')
            AND m.attempt_count = coalesce(a.attempt_count, m.attempt_count)
        FOR UPDATE OF m SKIP LOCKED
    );
    -- A statement of its own, which sees what the locks have waited for.
    RETURN ARRAY(
        SELECT ROW(
            judged.id, judged.result, judged.state, CASE WHEN judged.result = 'superseded' THEN judged.newest_id END
        )::pgoutbox.act_result
        FROM (
            SELECT
                a.id,
                m.state,
                head.newest_id,
                CASE
                    WHEN m.id IS NULL THEN 'missing'
                    WHEN m.state <> ALL (states) THEN 'wrong_state'
                    WHEN m.attempt_count <> a.attempt_count THEN 'changed'
                    WHEN only_newest AND head.newest_id > m.id THEN 'superseded'
                    WHEN m.expires_at <= due_at THEN 'expires'
                    WHEN m.id <> ALL (locked) THEN 'locked'
                END AS result
            FROM (
                SELECT DISTINCT ON (u.id) u.id, u.attempt_count
                FROM unnest(ids, attempt_counts) AS u(id, attempt_count)
                ORDER BY u.id
            ) AS a
            LEFT JOIN pgoutbox.message AS m ON m.id = a.id
            LEFT JOIN pgoutbox.key_head AS head ON head.scope = m.topic AND head.key = m.coalesce_key
        ) AS judged
        ORDER BY judged.id
    );
END
$function$;
