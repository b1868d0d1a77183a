-- The conditions of complete_if_held.sql, for a completion by another statement.
SELECT pgoutbox._require_completion(%(name)s::text, %(count)s::bigint)
