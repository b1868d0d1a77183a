-- Remove the retention rule of a topic and state, and return whether there was one.
SELECT pgoutbox.unset_retention(%(topic)s::text, %(state)s::text) AS was_set
