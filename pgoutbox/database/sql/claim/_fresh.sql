-- The lane of fresh messages, which has the index message_live_lane: a backlog of retries never delays it. Messages in
-- flight stay in it, so that the claim of a message without a key writes no index.
AND m.lane = 0
\ir _after_position.sql
