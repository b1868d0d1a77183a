-- Send the notification of listen_for_itself.sql.
SELECT pg_notify('pgoutbox_doctor', %(payload)s::text)
