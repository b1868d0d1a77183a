-- FIND with the payloads. The last parameter is the owner again. PostgreSQL checks the right to call `read_payloads` even if
-- no message is found.
WITH found AS MATERIALIZED (
    SELECT f.*
    FROM
        \ir _find.sql
)
SELECT (
    pg_catalog.to_jsonb(f)
    OPERATOR(pg_catalog.||) pg_catalog.jsonb_build_object('payload', p.payload, 'payload_version', p.payload_version)
)::pg_catalog.text
FROM found AS f
JOIN pgoutbox.read_payloads(
    ids => ARRAY(SELECT one.id FROM found AS one),
    owner => %s::pg_catalog.text
) AS p ON p.id OPERATOR(pg_catalog.=) f.id
ORDER BY f.id DESC
