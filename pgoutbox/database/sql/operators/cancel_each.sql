-- Cancel messages by id if they are in one of these states. One row per id, as in redrive.sql, without the state.
SELECT r.id, r.result, NULL AS state, NULL AS other_id
FROM pgoutbox._cancel_each(%(ids)s::bigint[], %(states)s::text[]) AS r
