-- Suppress an address. False: it is suppressed already.
SELECT pgoutbox.suppress(%(address)s::text, %(reason)s::text, %(mailing_list)s::text, %(detail)s::text)
