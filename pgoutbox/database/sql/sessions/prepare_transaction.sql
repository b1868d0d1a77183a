-- The settings of prepare_session.sql for one transaction: behind a pooler the server's session belongs to others too.
SELECT
    pgoutbox._require_home(%(deployment)s::text, %(package)s::text),
    set_config('statement_timeout', %(statement_timeout)s::text, true),
    set_config('lock_timeout', %(lock_timeout)s::text, true),
    set_config('idle_in_transaction_session_timeout', '10s', true),
    -- For a process that freezes in the midst of sending a trip. PostgreSQL before version 17 does not know this setting.
    CASE
        WHEN current_setting('transaction_timeout', true) IS NOT NULL
            THEN set_config('transaction_timeout', %(transaction_timeout)s::text, true)
    END,
    set_config('search_path', 'pg_catalog, pg_temp', true),
    set_config('enable_seqscan', 'off', true),
    set_config('enable_bitmapscan', 'off', true),
    set_config('enable_hashjoin', 'off', true),
    set_config('enable_mergejoin', 'off', true),
    set_config('enable_sort', 'off', true),
    set_config('jit', 'off', true)
