-- End the sessions of transactional attempts that were lost: a suspended worker, or a host without power, may keep them open
-- for hours, with their row locks. Such a session has the name of its claim, because it may have several attempts, and all
-- attempts of a claim are lost together. Run after the commit that ended the attempts.
SELECT pg_terminate_backend(a.pid)
FROM pg_stat_activity AS a
WHERE a.application_name = ANY (%(sessions)s::text[])
    AND a.datname = current_database()
    AND a.usename = current_user
