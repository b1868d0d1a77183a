-- End the sessions of transactional attempts that were lost: a suspended worker, or a host without power, may keep them open
-- for hours, with their row locks. Such a session has the name of its attempt. One that several attempts share has the name
-- of their claim, and ends when none of them is in flight any more. Run after the commit that ended the attempts.
SELECT pg_terminate_backend(a.pid)
FROM pg_stat_activity AS a
WHERE a.datname = current_database()
    AND a.usename = current_user
    AND (
        a.application_name = ANY (ARRAY(
            SELECT format('pgoutbox attempt %%s/%%s', lost.id, lost.attempt_count)
            FROM unnest(%(ids)s::bigint[], %(attempt_counts)s::integer[]) AS lost(id, attempt_count)
        ))
        OR (
            a.application_name = ANY (%(sessions)s::text[])
            AND NOT EXISTS (
                SELECT
                FROM pgoutbox.claim AS c
                CROSS JOIN LATERAL unnest(c.ids) AS i(id)
                JOIN pgoutbox.message_live AS m
                    ON m.id = i.id AND m.state = 'sending' AND m.worker = c.worker AND m.claimed_at = c.claimed_at
                WHERE a.application_name = format(
                    'pgoutbox attempts %%s %%s', right(c.worker, 8), (extract(epoch FROM c.claimed_at) * 1000000)::bigint
                )
            )
        )
    )
