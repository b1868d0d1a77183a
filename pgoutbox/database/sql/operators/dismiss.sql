-- End failed messages as skipped. One row per id, as in redrive.sql.
SELECT d.id, d.result, d.state, NULL AS other_id
FROM pgoutbox.dismiss(%(ids)s::bigint[], %(reason)s::text, %(attempt_counts)s::integer[]) AS d
