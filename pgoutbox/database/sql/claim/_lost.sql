-- Record the lost attempts in the history. After a failover that lost commits, the history may know the number already.
INSERT INTO pgoutbox.attempt (message_id, attempt_count, outcome, worker, started_at, ended_at, error)
SELECT j.id, j.attempt_count, 'lost', j.worker, j.claimed_at, now(), 'lease expired, outcome unknown'
FROM judged AS j
ON CONFLICT DO NOTHING
