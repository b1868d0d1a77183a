-- Make the workers of a queue search all due messages when this transaction commits; without a queue, those of all
-- queues. An act of an operator makes a message claimable that a worker has passed over before. Workers do not look for
-- such a message unless they are told to: they poll for new messages, and for those that fall due after their last poll.
-- The act may commit long after the time that it wrote. Unlike _notify_workers, this notifies even if no session has the
-- wake-up lock.
CREATE FUNCTION pgoutbox._wake_all_workers(queue text DEFAULT '')
RETURNS void
LANGUAGE plpgsql
AS $function$
BEGIN
    IF pg_notification_queue_usage() < 0.9 THEN
        PERFORM pg_notify('pgoutbox', 'all ' || queue);
        -- Idle workers that rely on another one listen here.
        PERFORM pg_notify('pgoutbox_idle', 'all ' || queue);
    END IF;
END
$function$;
