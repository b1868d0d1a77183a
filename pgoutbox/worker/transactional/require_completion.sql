-- The conditions of complete_if_held.sql, for a completion by another statement.
SELECT pgoutbox._require_completion(%(lost_count)s::bigint)
