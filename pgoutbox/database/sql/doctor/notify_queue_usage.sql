-- The usage of the notification queue, from 0 to 1. At 1, transactions that notify fail.
SELECT pg_notification_queue_usage()::float8 AS usage
