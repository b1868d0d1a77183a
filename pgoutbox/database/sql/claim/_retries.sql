-- The lane of retries: pending messages that were attempted before. It has the index message_live_retry, so that
-- retries and fresh messages do not delay each other.
AND m.attempt_count > 0 AND m.state = 'pending'
\ir _after_position.sql
