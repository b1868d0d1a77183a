-- The lapsed attempts of a queue whose message is tried again. They are suspects: one of them may have crashed its
-- process, and may do so again. A suspect that is claimed `alone` may have any history. A group takes only suspects that
-- can afford another loss: those with more than half of their granted attempts left.
AND m.queue = %(queue)s::text
AND ending.state IS NULL
AND (%(alone)s::boolean OR m.max_attempts - m.attempt_count > m.attempt_budget / 2)
