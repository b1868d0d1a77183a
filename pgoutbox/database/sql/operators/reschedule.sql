-- Make pending messages due at a time, or at once. One row per id: the result, its state before, and the newer message
-- if it is superseded.
SELECT r.id, r.result, r.state, r.superseded_by
FROM pgoutbox.reschedule(%(ids)s::bigint[], %(available_at)s::timestamptz) AS r
