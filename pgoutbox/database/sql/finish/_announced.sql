-- Enqueue one message for the hook of each message that `finished` ended as failed. It commits with the failure. `hooks`
-- gives the number of its attempts by the topic of the failed message.
SELECT
    f.id,
    pgoutbox._enqueue_failure(f.failure, (%(hooks)s::jsonb ->> (f.failure ->> 'topic'))::integer) AS hook_id
FROM finished AS f
WHERE f.failure IS NOT NULL
