-- The tables, views and sequences of the schema that do not exist.
SELECT needed.name
FROM unnest(
    ARRAY[
        'attempt_view', 'audit', 'blackout', 'blackout_view', 'breaker', 'breaker_view',
        'cancel_request', 'claim', 'content', 'dedupe', 'fair_share', 'fair_share_view', 'home', 'home_view', 'key_head',
        'id_floor', 'in_flight_view', 'maintenance_run',
        'message', 'message_done', 'message_done_default', 'message_failed', 'message_id_seq',
        'message_live', 'message_view', 'pulse_view', 'queue', 'queue_view', 'rate_claim', 'redirect',
        'redirect_view', 'retention', 'retention_view', 'revision', 'secret',
        'schedule', 'schedule_view', 'suppression', 'suppression_view', 'topic_pause', 'topic_pause_view',
        'waiting_view', 'worker', 'worker_event_view', 'worker_view'
    ]
) AS needed(name)
WHERE NOT EXISTS (
    SELECT
    FROM pg_catalog.pg_class AS c
    JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
    WHERE n.nspname = 'pgoutbox' AND c.relname = needed.name
)
ORDER BY needed.name
