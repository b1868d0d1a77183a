-- Make finished messages pending again, if they are in one of these states. One row per id: its state before, the newer
-- message if it was superseded, and the other message that has its dedupe key. Operators change messages through
-- functions, so they need no privilege on the tables.
SELECT r.id, r.redriven, r.state, r.superseded_by, r.attempt_count, r.dedupe_key_of
FROM pgoutbox.redrive(%(ids)s::bigint[], %(states)s::text[], %(attempt_counts)s::integer[]) AS r
