-- Whether this role may read the acts of operators.
SELECT has_table_privilege('pgoutbox.audit', 'SELECT') AS reads_audit
