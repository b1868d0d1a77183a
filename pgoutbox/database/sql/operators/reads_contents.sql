-- Whether this role may read the contents of fan-outs.
SELECT has_table_privilege('pgoutbox.content', 'SELECT') AS reads_contents
