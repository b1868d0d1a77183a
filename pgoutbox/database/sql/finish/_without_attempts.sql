-- The claim `e` has no attempt in flight. This is the condition of in_flight_view, which would read all claims.
AND NOT EXISTS (
    SELECT FROM pgoutbox.message_live AS begun
    WHERE begun.id = ANY (e.ids)
        AND begun.state = 'sending'
        AND begun.worker = e.worker
        AND begun.claimed_at = e.claimed_at
    OFFSET 0
)
