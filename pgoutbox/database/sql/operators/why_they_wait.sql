-- Why these messages wait, for those that are pending: the reason, the message for which each waits, until when, and the
-- name that a worker must have for it.
SELECT w.id, w.reason, w.waits_for, w.until, w.handled_as
FROM pgoutbox.waiting_view AS w
WHERE w.id = ANY (%(ids)s::bigint[])
