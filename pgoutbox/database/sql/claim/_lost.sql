-- The history with the attempt that was lost.
pgoutbox._with_attempt(m.attempts, (
    j.attempt_count, 1, 'lost', j.worker, j.claimed_at, now(), 'lease expired, outcome unknown', NULL, NULL, NULL
)::pgoutbox.attempt)
