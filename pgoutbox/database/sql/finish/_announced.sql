-- Enqueue one message for the hook of each message that `finished` ended as failed. It commits with the failure.
SELECT f.id, pgoutbox.enqueue(
    topic => f.failure ->> 'topic' || '.failed',
    payload => f.failure - 'headers',
    queue => f.failure ->> 'queue',
    headers => nullif(f.failure -> 'headers', 'null'),
    max_attempts => (%(hooks)s::jsonb ->> (f.failure ->> 'topic'))::integer,
    owner => f.failure ->> 'owner'
) AS hook_id
FROM finished AS f
WHERE f.failure IS NOT NULL
