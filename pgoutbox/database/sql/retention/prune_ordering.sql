-- Delete unused ordering keys, one page at a time; the answer is that of prune_coalesce.sql.
SELECT p.last_queue, p.last_key, p.key_count, p.forgotten_count
FROM pgoutbox._prune_ordering(
    at_most => %(limit)s::bigint,
    after_queue => %(after_scope)s::text,
    after_key => %(after_key)s::text
) AS p
