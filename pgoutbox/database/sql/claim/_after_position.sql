-- Where the scan starts: after the last row of the previous claim, or else (`after_due_at` is null) at the messages that fell
-- due in the last `since_seconds`. So it does not step again over messages in flight, the dead index entries of finished
-- ones, and messages that wait for others. Earlier rows that were locked, had to wait or were committed late are not
-- lost: the worker often claims from the beginning of the lane, where `since_seconds` is about 32 years.
AND (m.available_at, m.id) > (
    coalesce(%(after_due_at)s::timestamptz, now() - make_interval(secs => %(since_seconds)s::float8)),
    %(after_id)s::bigint
)
