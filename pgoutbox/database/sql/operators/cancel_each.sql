-- Cancel messages by id if they are in one of these states; one row per message with the result.
SELECT r.id, r.result
FROM pgoutbox._cancel_each(%(ids)s::bigint[], %(states)s::text[]) AS r
