"""The settings of pgoutbox's sessions, independent of the role's defaults."""

from typing import Final, LiteralString

# The driver reads times and intervals only in these formats. They end with the transaction, so that they do not stay in
# a pooler's session.
TRANSACTION_FORMATS: Final[LiteralString] = """
    set_config('datestyle', 'ISO, MDY', true),
    set_config('intervalstyle', 'postgres', true),
    set_config('timezone', 'UTC', true),
    set_config('bytea_output', 'hex', true),
    set_config('extra_float_digits', '1', true),
"""

# The role's or the database's defaults must not change the meaning of a statement. The planner settings pin the plan
# that is fast with any statistics: nested loops over the lanes' indexes and the primary key, each in the order of its
# index. Waiting sessions are idle, so idle_session_timeout is off. PostgreSQL before version 17 does not know
# transaction_timeout.
PREPARE_SESSION: Final[LiteralString] = """
SELECT
    set_config('default_transaction_isolation', 'read committed', false),
    set_config('default_transaction_deferrable', 'off', false),
    set_config('statement_timeout', %(statement_timeout)s::text, false),
    set_config('lock_timeout', %(lock_timeout)s::text, false),
    set_config('idle_in_transaction_session_timeout', '60s', false),
    set_config('idle_session_timeout', '0', false),
    CASE
        WHEN current_setting('transaction_timeout', true) IS NOT NULL THEN set_config('transaction_timeout', '0', false)
    END,
    set_config('search_path', 'pg_catalog, pg_temp', false),
    -- The driver reads times of any other zone three times as slowly.
    set_config('TimeZone', 'UTC', false),
    set_config('plan_cache_mode', 'force_generic_plan', false),
    set_config('enable_seqscan', 'off', false),
    set_config('enable_bitmapscan', 'off', false),
    set_config('enable_hashjoin', 'off', false),
    set_config('enable_mergejoin', 'off', false),
    set_config('enable_sort', 'off', false),
    set_config('jit', 'off', false)
"""

PREPARE_TRANSACTION: Final[LiteralString] = """
SELECT
    set_config('statement_timeout', %(statement_timeout)s::text, true),
    set_config('lock_timeout', %(lock_timeout)s::text, true),
    set_config('idle_in_transaction_session_timeout', '10s', true),
    CASE
        WHEN current_setting('transaction_timeout', true) IS NOT NULL THEN set_config('transaction_timeout', '0', true)
    END,
    set_config('search_path', 'pg_catalog, pg_temp', true),
    set_config('enable_seqscan', 'off', true),
    set_config('enable_bitmapscan', 'off', true),
    set_config('enable_hashjoin', 'off', true),
    set_config('enable_mergejoin', 'off', true),
    set_config('enable_sort', 'off', true),
    set_config('jit', 'off', true)
"""

BEGIN: Final[LiteralString] = "BEGIN ISOLATION LEVEL READ COMMITTED"

COMMIT: Final[LiteralString] = "COMMIT"

ROLLBACK: Final[LiteralString] = "ROLLBACK"

SERVER_TIME: Final[LiteralString] = "SELECT clock_timestamp()"

BACKEND_PID: Final[LiteralString] = "SELECT pg_backend_pid()"

# The session of a statement without an answer. Another session may have its process number now. It can be ended,
# because its answer is not needed. But ending a wait for a synchronous standby would show a commit that a failover may
# lose.
END_STRANDED: Final[LiteralString] = """
SELECT
    CASE WHEN a.wait_event IS NOT DISTINCT FROM 'SyncRep' THEN false ELSE pg_terminate_backend(a.pid, 1000) END,
    coalesce(a.wait_event, a.state, 'no state')
FROM pg_stat_activity AS a
WHERE a.pid = %(pid)s::integer
    AND a.usename = current_user
    AND a.application_name = current_setting('application_name')
"""

SERVER_FACTS: Final[LiteralString] = """
SELECT
    current_setting('server_version_num')::integer AS server_version,
    pg_is_in_recovery() AS in_recovery,
    current_setting('transaction_read_only')::boolean AS read_only,
    current_setting('server_encoding') AS encoding,
    to_regprocedure('pgoutbox.schema_version()') IS NOT NULL AS has_schema
"""

SCHEMA_VERSION: Final[LiteralString] = "SELECT pgoutbox.schema_version()"
