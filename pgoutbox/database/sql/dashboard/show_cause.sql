-- The cause of a failed message, which all messages of its group have.
SELECT m.cause FROM pgoutbox.message_view AS m WHERE m.state = 'failed' AND m.id = %(id)s::bigint
