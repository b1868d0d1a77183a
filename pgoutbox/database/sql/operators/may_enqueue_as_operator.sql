-- Whether the role may enqueue as an operator. Otherwise it enqueues as an application does, without a row in the audit.
SELECT EXISTS (
    SELECT
    FROM pg_catalog.pg_proc AS p
    WHERE p.pronamespace = to_regnamespace('pgoutbox')
        AND p.proname = '_enqueue_act'
        AND has_function_privilege(p.oid, 'EXECUTE')
)
