-- Enqueue a copy of a sent message. One row: the id of the copy, null if it was refused; the state of the message; and
-- the newer message that supersedes it. No row: no such message.
SELECT r.id, r.state, r.superseded_by
FROM pgoutbox.resend(%(id)s::bigint) AS r
