-- Suppress many addresses or digests. Returns the number of new ones.
SELECT pgoutbox.import_suppressions(%(items)s::jsonb)
