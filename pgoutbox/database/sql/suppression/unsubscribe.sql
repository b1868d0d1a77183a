-- Suppress the address of a link to unsubscribe. False: the link is older than the end of its last suppression.
SELECT pgoutbox._unsubscribe(%(digest)s::text, %(mailing_list)s::text, %(issued_at)s::timestamptz)
