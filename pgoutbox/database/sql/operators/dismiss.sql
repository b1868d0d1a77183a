-- End failed messages as skipped. One row per id: the result, and its state before.
SELECT d.id, d.result, d.state
FROM pgoutbox.dismiss(%(ids)s::bigint[], %(reason)s::text, %(attempt_counts)s::integer[]) AS d
