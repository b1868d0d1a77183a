-- Why these messages wait, for those that are pending: the reason, the message for which each waits, until when, the name
-- that a worker must have for it, and the limit of its fair key that is reached.
SELECT w.id, w.reason, w.waits_for, w.until, w.handled_as, w.cap
FROM pgoutbox.waiting_view AS w
WHERE w.id = ANY (%(ids)s::bigint[])
