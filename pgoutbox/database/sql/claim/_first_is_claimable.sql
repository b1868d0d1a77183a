-- Whether the first message of an ordering key may be claimed. OFFSET 0 makes PostgreSQL look up each key in the index,
-- whatever the statistics say.
first.available_at <= now()
AND first.topic = ANY (%(topics)s::text[])
-- No other message of the key is in flight.
AND NOT EXISTS (
    SELECT FROM pgoutbox.message_live AS sibling
    WHERE sibling.queue = %(queue)s::text AND sibling.key_in_flight = v.ordering_key
        AND sibling.ordering_key IS NOT NULL
    OFFSET 0
)
-- No failed message before it halts the key.
AND NOT EXISTS (
    SELECT FROM pgoutbox.message_failed AS f
    WHERE f.queue = %(queue)s::text AND f.ordering_key = v.ordering_key AND f.halts_key AND f.id < first.id
    OFFSET 0
)
