-- Record which messages wait for this open breaker: those of a topic whose destinations begin alike. The worker runs it
-- when it first meets such a message. It leaves these messages unclaimed; the row tells people why they wait.
UPDATE pgoutbox.breaker AS b
SET holds = array_append(b.holds, %(hold)s::text)
WHERE b.key = %(key)s::text AND %(hold)s::text <> ALL (b.holds)
RETURNING b.key
