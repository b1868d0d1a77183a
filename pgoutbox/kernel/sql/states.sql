-- The states of the messages of these attempts, unless another attempt has begun or this one counts as lost (its number,
-- worker and claim stay in the row). The worker reads them after a finish that did not write all of its rows. `sending`
-- means that the row was locked. Any other state means that an earlier try of the same finish was committed and its answer
-- lost. A message that this earlier try has deleted has no row.
SELECT m.id, m.state
FROM pgoutbox.message AS m
WHERE m.id = ANY (%(ids)s::bigint[])
    -- The last attempt of the row is this one: it has its number, worker and claim. After a failover that loses commits,
    -- another message may get the same id, and the same worker may claim it with the same number: only the time of the claim
    -- tells the two attempts apart. `ids` is sorted, so width_bucket finds the place of an attempt without a join.
    AND m.worker = %(worker)s::text
    AND m.attempt_count = (%(attempt_counts)s::integer[])[width_bucket(m.id, %(ids)s::bigint[])]
    AND m.claimed_at = (%(claimed_ats)s::timestamptz[])[width_bucket(m.id, %(ids)s::bigint[])]
    AND (m.attempts #> '{-1}' @> jsonb_build_object('attempt_count', m.attempt_count, 'outcome', 'lost')) IS NOT TRUE
