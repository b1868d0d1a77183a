-- Whether the role acts as an operator. Otherwise it enqueues and cancels as an application does, without a row in the audit.
SELECT EXISTS (
    SELECT
    FROM pg_catalog.pg_proc AS p
    WHERE p.pronamespace = to_regnamespace('pgoutbox')
        AND p.proname = 'announce_act'
        AND has_function_privilege(p.oid, 'EXECUTE')
)
