-- The claimable messages of the ordering keys of up to `key_limit` messages that fell due in the last `since_seconds`, so
-- that new messages do not wait until a round over many keys reaches theirs. find_ordered.sql finds all other messages.
WITH new AS MATERIALIZED (
    SELECT m.ordering_key
    FROM pgoutbox.message_live AS m
    WHERE m.queue = %(queue)s::text AND m.ordering_key IS NOT NULL AND m.state = 'pending'
        AND m.available_at BETWEEN now() - make_interval(secs => %(since_seconds)s::float8) AND now()
        -- Always true: it permits the index message_live_ordered_due.
        AND m.available_at > '-infinity'
    ORDER BY m.available_at
    LIMIT %(key_limit)s::integer
)
SELECT first.id
FROM (SELECT DISTINCT n.ordering_key FROM new AS n) AS v
\ir _first_of_key.sql
WHERE
    \ir _first_is_claimable.sql
