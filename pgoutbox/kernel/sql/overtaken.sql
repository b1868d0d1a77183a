-- Those of the claimed messages that are superseded. The worker runs this after the commit of a claim: another worker
-- may have claimed, delivered and finished a newer message since the claim's snapshot. The claim has the keys in
-- flight, so no newer message can begin after this query.
SELECT m.id
FROM pgoutbox.message_live AS m
WHERE m.id = ANY (%(ids)s::bigint[])
    AND (
        SELECT head.newest_id > m.id
        FROM pgoutbox.key_head AS head
        WHERE head.scope = m.topic AND head.key = m.coalesce_key
    )
