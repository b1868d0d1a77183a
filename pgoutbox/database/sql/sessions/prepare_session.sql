-- Settings of a worker's session on a direct connection. The role's or the database's defaults must not change the
-- meaning or the plan of a statement.
SELECT
    pgoutbox._require_home(%(deployment)s::text, %(package)s::text),
    set_config('default_transaction_isolation', 'read committed', false),
    set_config('default_transaction_deferrable', 'off', false),
    set_config('statement_timeout', %(statement_timeout)s::text, false),
    set_config('lock_timeout', %(lock_timeout)s::text, false),
    set_config('idle_in_transaction_session_timeout', '60s', false),
    -- Waiting sessions are idle.
    set_config('idle_session_timeout', '0', false),
    -- For a process that freezes in the midst of sending a trip. PostgreSQL before version 17 does not know this setting.
    CASE
        WHEN current_setting('transaction_timeout', true) IS NOT NULL
            THEN set_config('transaction_timeout', %(transaction_timeout)s::text, false)
    END,
    set_config('search_path', 'pg_catalog, pg_temp', false),
    -- The driver reads times of any other zone three times as slowly.
    set_config('TimeZone', 'UTC', false),
    -- These pin the plan that is fast with any statistics: nested loops over the lanes' indexes and the primary key,
    -- each in the order of its index.
    set_config('plan_cache_mode', 'force_generic_plan', false),
    set_config('enable_seqscan', 'off', false),
    set_config('enable_bitmapscan', 'off', false),
    set_config('enable_hashjoin', 'off', false),
    set_config('enable_mergejoin', 'off', false),
    set_config('enable_sort', 'off', false),
    set_config('jit', 'off', false)
