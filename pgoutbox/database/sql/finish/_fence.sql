-- The fence: an attempt may write its row while the row is in flight in this attempt.
AND m.state = 'sending'
-- The last attempt of the row is this one: it has its number, worker and claim. After a failover that loses commits,
-- another message may get the same id, and the same worker may claim it with the same number: only the time of the claim
-- tells the two attempts apart. `ids` is sorted, so width_bucket finds the place of an attempt without a join.
AND m.worker = %(worker)s::text
AND m.attempt_count = (%(attempt_counts)s::integer[])[width_bucket(m.id, %(ids)s::bigint[])]
AND m.claimed_at = (%(claimed_ats)s::timestamptz[])[width_bucket(m.id, %(ids)s::bigint[])]
