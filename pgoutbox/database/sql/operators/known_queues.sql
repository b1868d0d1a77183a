-- All queues with messages or controls. This reads every message.
SELECT DISTINCT m.queue FROM pgoutbox.message_view AS m
UNION
SELECT q.name FROM pgoutbox.queue_view AS q
ORDER BY 1
