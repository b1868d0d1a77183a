-- Finish the attempt of a transactional handler as sent, in the handler's transaction. Its COMMIT travels with it, so it
-- raises an error if the attempt does not hold its message, or if the handler has ended its transaction.
WITH sent AS (
    UPDATE pgoutbox.message AS m
    SET state = 'sent',
        finished_at = now(),
        key_in_flight = NULL
    WHERE m.id = ANY (%(ids)s::bigint[])
        \ir _fence.sql
        -- It waits for a locked row: PostgreSQL sees a deadlock with the handler's own locks, and ends it.
        AND (SELECT set_config('lock_timeout', '0', true)) IS NOT NULL
    RETURNING m.id
)
SELECT pgoutbox._require_completion(%(name)s::text, (SELECT count(*) FROM sent AS s))
