-- End the session of a statement that got no answer. The conditions on role and application name protect another
-- session that may have its process number now.
SELECT
    -- Its answer is not needed. But the end of a wait for a synchronous standby would show a commit that a failover may
    -- lose.
    CASE WHEN a.wait_event IS NOT DISTINCT FROM 'SyncRep' THEN false ELSE pg_terminate_backend(a.pid, 1000) END,
    coalesce(a.wait_event, a.state, 'no state')
FROM pg_stat_activity AS a
WHERE a.pid = %(pid)s::integer
    AND a.usename = current_user
    AND a.application_name = current_setting('application_name')
