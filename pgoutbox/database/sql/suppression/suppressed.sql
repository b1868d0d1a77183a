-- For each address and mailing list in their order the digest of the address, the reason why no mail of the list may go
-- there, or null, and the time. A worker asks it for the attempts that are about to begin.
SELECT s.digest, s.reason, s.asked_at
FROM pgoutbox._suppressed(%(addresses)s::text[], %(mailing_lists)s::text[]) AS s
