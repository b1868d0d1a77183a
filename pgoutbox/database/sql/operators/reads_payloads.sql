-- Whether this role may read payloads, and not only their structure.
SELECT has_column_privilege('pgoutbox.message', 'payload', 'SELECT') AS reads_payloads
