-- The ordering key of a message at random, from about fifty pages of the table. A process begins its first round over many
-- keys there: if each began at the first key, short processes would never reach the last ones.
SELECT m.ordering_key
FROM pgoutbox.message_live AS m
    TABLESAMPLE system (least(100, 5000.0 * 8192 / (1 + pg_relation_size('pgoutbox.message_live'))))
WHERE m.queue = %(queue)s::text AND m.ordering_key IS NOT NULL
ORDER BY random()
LIMIT 1
