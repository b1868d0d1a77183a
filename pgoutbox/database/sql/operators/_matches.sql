-- The conditions of a filter of messages; null parameters do not restrict. A group is one of list_failures.sql: its
-- topic and cause, hashed.
(%(states)s::text[] IS NULL OR m.state = ANY (%(states)s::text[]))
AND (
    %(due)s::text IS NULL
    OR m.state = 'pending' AND CASE %(due)s::text
        WHEN 'now' THEN m.available_at <= now()
        WHEN 'later' THEN m.available_at > now()
        -- An attempt has failed: snoozes, releases and postponements raise both numbers.
        WHEN 'again' THEN m.attempt_count + m.attempt_budget > m.max_attempts
    END
)
AND (%(ids)s::bigint[] IS NULL OR m.id = ANY (%(ids)s::bigint[]))
AND (%(topic)s::text IS NULL OR m.topic = %(topic)s::text)
AND (%(queue)s::text IS NULL OR m.queue = %(queue)s::text)
AND (
    %(destination)s::text IS NULL
    OR m.destination IN (%(destination)s::text, 'mailto:' || %(destination)s::text)
)
AND (%(owner)s::text IS NULL OR m.owner = %(owner)s::text)
AND (%(key)s::text IS NULL OR %(key)s::text IN (m.coalesce_key, m.dedupe_key, m.ordering_key, m.fair_key))
-- A text is searched literally, without wildcards. Payloads are not searched: hidden values could be guessed letter by
-- letter.
AND (
    %(text)s::text IS NULL
    OR strpos(
        lower(
            concat_ws(
                E'\n',
                m.destination,
                m.coalesce_key,
                m.dedupe_key,
                m.ordering_key,
                m.fair_key,
                m.owner,
                m.skip_reason,
                m.last_error
            )
        ),
        lower(%(text)s::text)
    ) > 0
)
AND (%(created_from)s::timestamptz IS NULL OR m.created_at >= %(created_from)s::timestamptz)
AND (%(created_before)s::timestamptz IS NULL OR m.created_at < %(created_before)s::timestamptz)
AND (
    %(error_group)s::text IS NULL
    OR m.state = 'failed' AND pgoutbox._error_group(m.topic, m.cause) = %(error_group)s::text
)
-- Behind an open breaker are the messages of its holds, and those that it has postponed last.
AND (
    %(breaker)s::text IS NULL
    OR m.state = 'pending' AND (
        pgoutbox._hold_of(m.queue, m.topic, m.payload_version, m.destination) IN (
            SELECT unnest(b.holds) FROM pgoutbox.breaker_view AS b WHERE b.key = %(breaker)s::text
        )
        -- A closed breaker stays in the last attempt of the messages that it has postponed.
        OR m.breaker_key IN (SELECT b.key FROM pgoutbox.breaker_view AS b WHERE b.key = %(breaker)s::text)
    )
)
