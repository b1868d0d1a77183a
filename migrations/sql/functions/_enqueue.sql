-- The only function that writes new messages, besides the plain case of _enqueue_receipt. Everything is checked before the
-- first row is written. Each call locks dedupe keys first and then the other keys, each kind sorted. So two transactions
-- that make one call each never wait for each other in a circle. Its callers pin the settings of the session.
CREATE FUNCTION pgoutbox._enqueue(
    drafts pgoutbox.draft[],
    notify boolean,
    place text DEFAULT NULL,
    content_id bigint DEFAULT NULL,
    resend_of bigint DEFAULT NULL,
    failure_of bigint DEFAULT NULL
)
RETURNS bigint[]
LANGUAGE plpgsql
AS $function$
#variable_conflict use_column
DECLARE
    has_errors boolean;
    has_dedupe_keys boolean;
    has_keys boolean;
    has_waits boolean;
    ids bigint[];
    known_ids bigint[]; -- The messages that have the dedupe keys of these drafts; null for a draft that is written.
    taken record;
    older_ids bigint[];
    waiting_since timestamptz[];
    queues text[];
    woken text;
BEGIN
    SELECT
        count(pgoutbox._draft_error(d)) > 0, count(d.dedupe_key) > 0,
        count(coalesce(d.coalesce_key, d.ordering_key)) > 0, count(d.max_delay) > 0,
        array_agg(nextval('pgoutbox.message_id_seq'))
    INTO has_errors, has_dedupe_keys, has_keys, has_waits, ids
    FROM unnest(drafts) AS d;
    IF has_errors THEN
        PERFORM pgoutbox._raise_argument_error(e.problem, place, e.n)
        FROM (SELECT pgoutbox._draft_error(d) AS problem, row_number() OVER () - 1 AS n FROM unnest(drafts) AS d) AS e
        WHERE e.problem IS NOT NULL
        LIMIT 1;
    END IF;
    IF has_dedupe_keys THEN
        known_ids := pgoutbox._take_dedupe_keys(drafts, ids);
    END IF;
    IF has_keys THEN
        taken := pgoutbox._take_keys(drafts, ids, known_ids);
        IF known_ids IS NOT NULL AND taken.ids <> ids THEN
            -- A draft can be a duplicate of another one of this call.
            known_ids := ARRAY(
                SELECT coalesce(r.new_id, known_ids[n])
                FROM generate_subscripts(ids, 1) AS n
                LEFT JOIN unnest(ids, taken.ids) AS r(id, new_id) ON r.id = known_ids[n]
                ORDER BY n
            );
        END IF;
        ids := taken.ids;
        older_ids := taken.older_ids;
    END IF;
    IF has_waits THEN
        waiting_since := pgoutbox._waiting_since(drafts, known_ids);
    END IF;

    WITH written AS (
        INSERT INTO pgoutbox.message_live (
            id, topic, payload, queue, destination, owner, coalesce_key, ordering_key, dedupe_key, halts_key,
            available_at, expires_at, max_attempts, attempt_budget, headers, content_id, resend_of, failure_of
        )
        SELECT
            ids[d.ordinality], d.topic, d.payload, coalesce(d.queue, 'default'), d.destination, d.owner, d.coalesce_key,
            d.ordering_key, d.dedupe_key, coalesce(d.halts_key, false), due.at,
            coalesce(d.expires_at, due.at + d.expires_after), coalesce(d.max_attempts, 11),
            coalesce(d.max_attempts, 11), d.headers, _enqueue.content_id, _enqueue.resend_of, _enqueue.failure_of
        FROM unnest(drafts) WITH ORDINALITY AS d
        CROSS JOIN LATERAL (
            SELECT greatest(
                now(), least(greatest(now(), d.available_at, now() + d.delay), waiting_since[d.ordinality] + d.max_delay)
            )
        ) AS due(at)
        WHERE known_ids[d.ordinality] IS NULL
        RETURNING queue
    )
    SELECT array_agg(DISTINCT w.queue) INTO queues FROM written AS w;

    IF older_ids IS NOT NULL AND EXISTS (
        SELECT
        FROM pgoutbox.message_live AS m
        WHERE m.id = ANY (older_ids) AND m.state = 'pending' AND m.available_at > clock_timestamp()
    ) THEN
        PERFORM pgoutbox._skip_superseded(older_ids, taken.newer_ids);
    END IF;
    IF notify IS NOT FALSE AND queues IS NOT NULL THEN
        FOREACH woken IN ARRAY queues LOOP
            PERFORM pgoutbox._notify_workers(woken);
        END LOOP;
    END IF;
    IF known_ids IS NULL THEN
        RETURN ids;
    END IF;
    RETURN ARRAY(SELECT coalesce(-known_ids[n], ids[n]) FROM generate_subscripts(ids, 1) AS n ORDER BY n);
END
$function$;

COMMENT ON FUNCTION pgoutbox._enqueue IS
    'Write drafts in this transaction. Returns their ids; in place of a duplicate, the id of the message that has its '
    'dedupe key, negative.';
