-- Delete up to `limit` finished messages older than an age, for an operator. One row per message: its state. A function
-- deletes them, so that neither workers nor operators need the privilege to delete.
SELECT p.state
FROM pgoutbox.prune(
    states => %(states)s::text[],
    older_than => make_interval(secs => %(older_than_seconds)s::float8),
    only_topic => %(topic)s::text,
    at_most => %(limit)s::bigint
) AS p(state)
