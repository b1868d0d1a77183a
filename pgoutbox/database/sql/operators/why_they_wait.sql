-- Why these messages wait, for those that are pending: the reason, the message for which each waits, and until when.
SELECT w.id, w.reason, w.waits_for, w.until
FROM pgoutbox.waiting_view AS w
WHERE w.id = ANY (%(ids)s::bigint[])
