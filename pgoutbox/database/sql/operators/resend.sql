-- Enqueue a copy of a sent message. One row, as in redrive.sql; the other message is the copy, or a newer message of its
-- key.
SELECT
    asked.id,
    CASE
        WHEN r.state IS NULL THEN 'missing'
        WHEN r.state <> 'sent' THEN 'wrong_state'
        WHEN r.id IS NULL THEN 'superseded'
        ELSE 'resent'
    END AS result,
    r.state,
    CASE WHEN r.state = 'sent' THEN coalesce(r.id, r.superseded_by) END AS other_id
FROM unnest(%(ids)s::bigint[]) AS asked(id)
LEFT JOIN LATERAL pgoutbox.resend(asked.id) AS r ON true
