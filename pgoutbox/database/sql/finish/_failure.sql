-- The payload of the hook's message, for a message that has just failed. Null for every other message, and for topics
-- without a hook in this worker. A sealed payload stays sealed; who unseals it needs the destination and the keys.
CASE WHEN m.state = 'failed' AND %(hooks)s::jsonb -> m.topic IS NOT NULL THEN jsonb_build_object(
    'message_id', m.id,
    'topic', m.topic,
    'queue', m.queue,
    'destination', m.destination,
    'owner', m.owner,
    'coalesce_key', m.coalesce_key,
    'ordering_key', m.ordering_key,
    'headers', m.headers,
    'error', m.last_error,
    'attempt_count', m.attempt_count,
    'created_at', m.created_at,
    'failed_at', m.finished_at,
    -- An enqueue refuses more than 16 MiB, and a refused enqueue would keep the message from failing.
    'payload', CASE WHEN octet_length(m.payload::text) <= 16000000 THEN m.payload END
) END AS failure
