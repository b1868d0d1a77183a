-- Enqueue these alerts. One row: the number of those that nobody had enqueued before.
WITH alerts AS (
    SELECT a.payload::jsonb AS payload, NULL::text AS coalesce_key, a.dedupe_key
    FROM unnest(%(payloads)s::text[], %(dedupe_keys)s::text[]) AS a(payload, dedupe_key)
)
\ir ../../database/sql/alert/_alerted.sql
