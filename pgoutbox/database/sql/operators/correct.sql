-- Change fields of pending and failed messages, and make failed ones pending again. One row per id, as in redrive.sql.
SELECT c.id, c.result, c.state, coalesce(c.superseded_by, c.dedupe_key_of) AS other_id
FROM pgoutbox.correct(
    %(ids)s::bigint[], %(changes)s::jsonb, %(states)s::text[], %(attempt_counts)s::integer[]
) AS c
