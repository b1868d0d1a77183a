-- End the suppression of an address. True: there was one.
SELECT pgoutbox.unsuppress(%s::pg_catalog.text, %s::pg_catalog.text)
