-- Delete unused contents of fan-outs, one page at a time; the answer is that of prune_keys.sql, with an id as the
-- key.
SELECT '', p.last_id::text, p.content_count, p.forgotten_count
FROM pgoutbox._prune_content(
    at_most => %(limit)s::bigint,
    after_id => coalesce(nullif(%(after_key)s::text, '')::bigint, 0)
) AS p
