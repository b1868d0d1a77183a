-- Why these messages wait, for those that are pending: id and reason.
SELECT w.id, w.reason
FROM pgoutbox.waiting_view AS w
WHERE w.id = ANY (%(ids)s::bigint[])
