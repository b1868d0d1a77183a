-- Make finished messages pending again, to another destination. The rows are those of redrive.sql. A right of its own.
SELECT r.id, r.redriven, r.state, r.superseded_by, r.attempt_count, r.dedupe_key_of, r.is_bound
FROM pgoutbox.redrive_to(
    %(ids)s::bigint[], %(destination)s::text, %(states)s::text[], %(attempt_counts)s::integer[]
) AS r
