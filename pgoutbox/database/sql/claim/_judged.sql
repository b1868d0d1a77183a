-- For each due message: an attempt begins (`sending`), or the message ends (`skipped`) because it is superseded or
-- expired.
SELECT d.place, d.id, newer.id AS superseded_by,
    CASE WHEN newer.id IS NOT NULL OR d.expires_at <= now() THEN 'skipped' ELSE 'sending' END AS state
FROM due AS d
CROSS JOIN LATERAL (
    SELECT CASE
        WHEN d.newest_id > d.id THEN d.newest_id
        WHEN d.coalesces_pending THEN pgoutbox._newer_pending(d.topic, d.coalesce_key, %(queue)s::text, d.id)
    END
    -- OFFSET 0 keeps PostgreSQL from computing the expression once for each use.
    OFFSET 0
) AS newer(id)
-- By the rule `pending`, the newer message is locked: no session can cancel or claim it before this claim commits. So
-- an attempt of the key begins after every commit of a producer. If another session has the lock or has changed the
-- newer message, this message can neither begin nor end now. It is left to a later claim.
WHERE d.coalesces_pending IS NOT TRUE OR newer.id IS NULL OR pgoutbox._lock_if_due(newer.id)
-- The UPDATE enters the coalesce keys into the unique index message_live_in_flight in this order. Without one order
-- for all claims, two claims could deadlock. Messages without a key enter nothing: the CASE spares comparing topics.
ORDER BY d.coalesce_key, CASE WHEN d.coalesce_key IS NOT NULL THEN d.topic END
