-- Sessions that hold a wake-up lock and should not. Listeners hold this advisory lock of a queue exclusively, and
-- enqueuing transactions share it until they end. Any other holder, and a shared lock without a transaction, is an
-- error.
SELECT
    concat_ws(
        ', ',
        'process ' || l.pid,
        'user ' || a.usename,
        'application ' || nullif(a.application_name, '')
    ) AS name,
    l.pid,
    bool_or(l.mode = 'ShareLock') AS is_shared
FROM pg_catalog.pg_locks AS l
JOIN pg_catalog.pg_database AS d ON d.oid = l.database AND d.datname = current_database()
LEFT JOIN pg_catalog.pg_stat_activity AS a ON a.pid = l.pid
WHERE l.locktype = 'advisory'
    AND l.classid = 1885826146
    AND l.objsubid = 2
    AND l.granted
    AND a.application_name IS DISTINCT FROM 'pgoutbox listen'
    -- A worker of many databases listens on the connection of its claims.
    AND starts_with(a.application_name, 'pgoutbox claim ') IS NOT TRUE
    AND (l.mode = 'ExclusiveLock' OR a.state = 'idle')
GROUP BY l.pid, a.usename, a.application_name
ORDER BY l.pid
LIMIT 10
