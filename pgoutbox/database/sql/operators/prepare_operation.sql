-- Settings of an operator's transaction. They are local to the transaction, so that they do not stay in a pooler's
-- session.
SELECT
    -- The driver reads times and intervals only in these formats.
    set_config('datestyle', 'ISO, MDY', true),
    set_config('intervalstyle', 'postgres', true),
    set_config('timezone', 'UTC', true),
    set_config('bytea_output', 'hex', true),
    set_config('extra_float_digits', '1', true),

    set_config('statement_timeout', %(statement_timeout)s::text, true),
    set_config('lock_timeout', '2s', true),
    set_config('idle_in_transaction_session_timeout', '60s', true),
    CASE
        WHEN current_setting('transaction_timeout', true) IS NOT NULL THEN set_config('transaction_timeout', '0', true)
    END,
    set_config('search_path', 'pg_catalog, pg_temp', true)
