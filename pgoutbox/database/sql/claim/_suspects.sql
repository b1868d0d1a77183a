-- The lapsed attempts of a queue whose message is tried again. They are suspects: one of them may have crashed its
-- process, and may do so again. A total of 1 takes the suspect that has waited longest. A greater total takes only
-- suspects that can afford another loss: those with more than half of their granted attempts left.
AND m.queue = %(queue)s::text
AND ending.state IS NULL
AND (%(total)s::bigint = 1 OR m.max_attempts - m.attempt_count > m.attempt_budget / 2)
