-- The messages of an owner, newest first, each as JSON text: a connection may have the application's own codecs for
-- times.
SELECT pg_catalog.to_jsonb(f)::pg_catalog.text
FROM
    \ir _find.sql
ORDER BY f.id DESC
