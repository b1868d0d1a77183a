-- Delete unused coalesce and ordering keys among the `limit` keys after the given one. One row: the last key of the page,
-- its number of keys, and the number of deleted keys. No row: no key follows.
SELECT p.last_scope, p.last_key, p.key_count, p.forgotten_count
FROM pgoutbox._prune_keys(
    at_most => %(limit)s::bigint,
    after_scope => %(after_scope)s::text,
    after_key => %(after_key)s::text
) AS p
