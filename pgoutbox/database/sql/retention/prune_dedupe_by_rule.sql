-- Delete dedupe keys by one retention rule, one page at a time; the answer is that of prune_coalesce.sql.
SELECT p.last_topic, p.last_key, p.key_count, p.forgotten_count
FROM pgoutbox._prune_dedupe_by_rule(
    rule_topic => %(topic)s::text,
    at_most => %(limit)s::bigint,
    after_topic => %(after_scope)s::text,
    after_key => %(after_key)s::text
) AS p
