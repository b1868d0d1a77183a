-- Of these queues, or with `by` = 'topic' of these topics, the messages that ended in the last `seconds`: their rate, and
-- for topics the median and the 95th percentile of the seconds in which the sent ones waited and were handled. A sent
-- message waited from its due time to its last claim, or from its enqueue if it was tried again and the due time is no
-- longer known. They are found by the block ranges of finished_at. Of more than `cap` messages only the first ones that are
-- read count, with their own time.
WITH ended AS MATERIALIZED (
    SELECT
        CASE %(by)s::text WHEN 'topic' THEN m.topic ELSE m.queue END AS name,
        m.finished_at,
        -- For queues, computing times of up to `cap` messages would double the duration of the statement.
        CASE WHEN %(by)s::text = 'topic' AND m.state = 'sent' THEN
            extract(epoch FROM m.claimed_at - CASE WHEN m.attempt_count = 1 THEN m.available_at ELSE m.created_at END)
        END::float8 AS waited,
        CASE WHEN %(by)s::text = 'topic' AND m.state = 'sent' THEN
            extract(epoch FROM m.finished_at - m.claimed_at)
        END::float8 AS handled
    FROM pgoutbox.message_view AS m
    WHERE m.state IN ('sent', 'failed', 'skipped', 'cancelled')
        AND m.finished_at > now() - make_interval(secs => %(seconds)s::float8)
    LIMIT %(cap)s::bigint
), span AS (
    SELECT
        CASE
            WHEN count(*) < %(cap)s::bigint THEN %(seconds)s::float8
            ELSE greatest(1, extract(epoch FROM max(e.finished_at) - min(e.finished_at)))::float8
        END AS seconds
    FROM ended AS e
)
SELECT
    e.name,
    count(*) / (SELECT s.seconds FROM span AS s) AS per_second,
    percentile_disc('{0.5,0.95}'::float8[]) WITHIN GROUP (ORDER BY e.waited) AS waited,
    percentile_disc('{0.5,0.95}'::float8[]) WITHIN GROUP (ORDER BY e.handled) AS handled
FROM ended AS e
WHERE e.name = ANY (%(names)s::text[])
GROUP BY e.name
