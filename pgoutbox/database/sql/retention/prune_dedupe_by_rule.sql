-- Delete the dedupe keys of deleted messages by the retention rules, one page at a time; the answer is that of
-- prune_keys.sql.
SELECT p.last_topic, p.last_key, p.key_count, p.forgotten_count
FROM pgoutbox._prune_dedupe_by_rule(
    at_most => %(limit)s::bigint,
    after_topic => %(after_scope)s::text,
    after_key => %(after_key)s::text
) AS p
