-- Delete dedupe keys older than an age, for an operator, one page at a time; the answer is that of prune_keys.sql.
SELECT p.last_topic, p.last_key, p.key_count, p.forgotten_count
FROM pgoutbox._prune_dedupe(
    older_than => make_interval(secs => %(older_than_seconds)s::float8),
    only_topic => %(topic)s::text,
    at_most => %(limit)s::bigint,
    after_topic => %(after_scope)s::text,
    after_key => %(after_key)s::text
) AS p
