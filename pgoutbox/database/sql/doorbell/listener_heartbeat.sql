-- Check that the session still listens, and read the usage of the notification queue. This also moves the queue's tail,
-- which otherwise may not move for a long time.
SELECT
    EXISTS (SELECT FROM pg_listening_channels() AS c(name) WHERE c.name = 'pgoutbox') AS is_listening,
    pg_notification_queue_usage()::float8 AS notify_usage
