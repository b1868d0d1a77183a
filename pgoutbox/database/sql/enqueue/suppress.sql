-- Suppress an address. True: it was not suppressed before.
SELECT pgoutbox.suppress(%s::pg_catalog.text, %s::pg_catalog.text, %s::pg_catalog.text)
