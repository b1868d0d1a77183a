-- The last message at the start of a bulk. The bulk ends there, so that it never reads its own new messages.
SELECT coalesce(max(m.id), 0) FROM pgoutbox.message_view AS m
