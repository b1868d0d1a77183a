-- Take messages in flight away from their workers. One row per id, as in redrive.sql.
SELECT r.id, r.result, r.state, NULL AS other_id
FROM pgoutbox.release(%(ids)s::bigint[], %(attempt_counts)s::integer[]) AS r
