-- End the suppression of an address in the caller's transaction. True: there was one.
SELECT pgoutbox.unsuppress(address => %s::pg_catalog.text, mailing_list => %s::pg_catalog.text)
