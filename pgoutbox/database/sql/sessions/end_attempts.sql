-- End the sessions of transactional handlers whose attempts were lost: a suspended worker, a host without power, or a
-- child of a killed worker may keep them open for hours, with their row locks. Such a session has the name of its attempt.
SELECT pg_terminate_backend(a.pid)
FROM pg_stat_activity AS a
WHERE a.datname = current_database()
    AND a.usename = current_user
    AND a.application_name = ANY (%(names)s::text[])
