-- Delete up to `limit` messages by one retention rule, among those finished between `since` and `until`. One row per
-- message: its state. The function reads the rule again: a rule that was removed meanwhile deletes nothing.
SELECT p.state
FROM pgoutbox._prune_by_rule(
    rule_topic => %(topic)s::text,
    rule_state => %(state)s::text,
    since => %(since)s::timestamptz,
    until => %(until)s::timestamptz,
    at_most => %(limit)s::bigint
) AS p(state)
