-- Whether this role may search all rows for a text.
SELECT has_function_privilege('pgoutbox.mentions(text[], bigint[])', 'EXECUTE') AS reads_mentions
