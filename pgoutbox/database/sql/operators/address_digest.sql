-- The digest of an address in the list of suppressed ones.
SELECT pgoutbox.address_digest(%(address)s::text)
