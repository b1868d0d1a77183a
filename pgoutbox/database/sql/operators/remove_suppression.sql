-- End the suppression of an address. False: there is none.
SELECT pgoutbox.unsuppress(%(address)s::text, %(mailing_list)s::text)
