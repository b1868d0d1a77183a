-- Read the channels of the session, and the usage of the notification queue. pg_notification_queue_usage() also moves
-- the queue's tail, which otherwise may not move for a long time.
SELECT
    ARRAY(SELECT c.name FROM pg_listening_channels() AS c(name)) AS channels,
    pg_notification_queue_usage()::float8 AS notify_usage
