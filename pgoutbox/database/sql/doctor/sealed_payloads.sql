-- Encrypted payloads of pending messages, to find a missing key. They can be large, so only few are read. `member` is
-- the JSON member of an encrypted payload.
SELECT m.topic, m.payload
FROM (
    SELECT live.topic, live.payload
    FROM pgoutbox.message AS live
    WHERE live.state = 'pending'
    LIMIT 1000
) AS m
WHERE jsonb_typeof(m.payload) = 'object' AND m.payload ? %(member)s::text
LIMIT 100
