-- The next `limit` messages that match the filter, in the order of ids, for a bulk in batches. The attempt count shows
-- which messages have failed again since then.
SELECT m.id, m.attempt_count
FROM pgoutbox.message_view AS m
WHERE
    \ir _matches.sql
    AND m.id > %(after_id)s::bigint
    AND m.id <= %(last_id)s::bigint
ORDER BY m.id
LIMIT %(limit)s::bigint
