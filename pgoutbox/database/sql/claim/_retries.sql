-- The lane of retries: messages that were attempted before. It has the index message_live_lane.
AND m.lane = 1
\ir _after_position.sql
