-- Switch the redirect off, and make messages that it held back due in two seconds. An operator runs this until no message
-- is left; each call changes up to 10,000 messages.
SELECT c.was_on, c.message_count
FROM pgoutbox.clear_redirect() AS c
