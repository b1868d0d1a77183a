-- Take messages in flight away from their workers. One row per id, with the result.
SELECT r.id, r.result, r.state
FROM pgoutbox.release(%(ids)s::bigint[], %(attempt_counts)s::integer[]) AS r
