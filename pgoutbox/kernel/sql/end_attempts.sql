-- End the sessions of transactional attempts that were lost: a suspended worker, or a host without power, may keep them open
-- for hours, with their row locks. Such a session has the name of its attempt. Run after the commit that ended the attempt.
SELECT pg_terminate_backend(a.pid)
FROM pg_stat_activity AS a
JOIN unnest(%(ids)s::bigint[], %(attempt_counts)s::integer[]) AS lost(id, attempt_count)
    ON a.application_name = format('pgoutbox attempt %%s/%%s', lost.id, lost.attempt_count)
WHERE a.datname = current_database()
    AND a.usename = current_user
