-- Close a circuit breaker, and make messages that it postponed due in a second. An operator runs this until no message
-- is left; each call changes up to 10,000 messages.
SELECT c.was_open, c.message_count
FROM pgoutbox.close_breaker(%(key)s::text) AS c
