-- The position is the last row of the previous claim of this lane, null and 0 for none. The scan starts after it and
-- does not step over the dead index entries of claimed messages again. Earlier rows that were locked, had to wait or
-- were committed late are not lost: the worker often claims from the beginning of the lane.
AND (m.available_at, m.id) > (coalesce(%(after_due_at)s::timestamptz, '-infinity'), %(after_id)s::bigint)
