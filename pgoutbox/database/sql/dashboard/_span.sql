-- The seconds in which the messages of `ended` have ended: all `seconds`, or less if they are the first `cap` of more.
, span AS (
    SELECT
        CASE
            WHEN count(*) < %(cap)s::bigint THEN %(seconds)s::float8
            ELSE greatest(1, extract(epoch FROM max(e.finished_at) - min(e.finished_at)))::float8
        END AS seconds
    FROM ended AS e
)
