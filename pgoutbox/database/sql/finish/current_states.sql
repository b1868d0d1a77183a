-- The states of the messages of these attempts, unless another attempt has begun or this one counts as lost (its number,
-- worker and claim stay in the row). The worker reads them after a finish that did not write all of its rows. `sending`
-- means that the row was locked. Any other state means that an earlier try of the same finish was committed and its answer
-- lost. A message that this earlier try has deleted has no row.
SELECT m.id, m.state
FROM pgoutbox.message AS m
WHERE m.id = ANY (%(ids)s::bigint[])
    \ir _attempt.sql
    AND (m.attempts #> '{-1}' @> jsonb_build_object('attempt_count', m.attempt_count, 'outcome', 'lost')) IS NOT TRUE
