-- Make finished messages pending again, if they are in one of these states. One row per id: the result, the state before,
-- and the newer message that supersedes it, or the message that has its dedupe key. Operators change messages through
-- functions, so they need no privilege on the tables. The statements of the other acts on messages have the same columns.
SELECT
    r.id,
    r.result,
    r.state,
    CASE r.result WHEN 'superseded' THEN r.superseded_by WHEN 'dedupe_key_taken' THEN r.dedupe_key_of END AS other_id
FROM pgoutbox.redrive(%(ids)s::bigint[], %(states)s::text[], %(attempt_counts)s::integer[]) AS r
