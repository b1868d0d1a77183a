-- Make pending messages due at a time, or at once. One row per id, as in redrive.sql.
SELECT r.id, r.result, r.state, r.superseded_by AS other_id
FROM pgoutbox.reschedule(%(ids)s::bigint[], %(available_at)s::timestamptz) AS r
