-- The lane of fresh messages: those that were never attempted, which are always pending. It has the index
-- message_live_fresh, so that a backlog of retries never delays them.
AND m.attempt_count = 0
\ir _after_position.sql
