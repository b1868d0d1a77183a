-- Write drafts in this transaction. Returns their ids; in place of a duplicate, the id of the message that has its dedupe
-- key, negative. _enqueue_receipt writes one message without an array. Every draft is checked before the first message is
-- written. Each call locks dedupe keys first and then the other keys, each kind sorted. So two transactions that make one
-- call each never wait for each other in a circle. No statement joins two sets: rows are looked up one by one, because a
-- plan may be made while the tables are empty and be used for thousands of drafts. Its callers pin the settings of the
-- session.
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
SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off
SET jit = off
AS $function$
#variable_conflict use_column
DECLARE
    -- It is read before the ids are drawn, so maintenance cannot have raised it above them.
    floor_id constant bigint := (SELECT f.newest_id FROM pgoutbox.id_floor AS f);
    first_id bigint;
    has_dedupe_keys boolean;
    has_keys boolean;
    ids bigint[];
    known_ids bigint[]; -- From _take_dedupe_keys: null for a draft that is written.
    taken record;
    older_ids bigint[];
    latest_at timestamptz[];
BEGIN
    PERFORM pgoutbox._raise_argument_error(p.problem, place, p.n)
    FROM (SELECT row_number() OVER () - 1 AS n, pgoutbox._draft_error(d) AS problem FROM unnest(drafts) AS d) AS p
    WHERE p.problem IS NOT NULL
    LIMIT 1;
    SELECT
        array_agg(i.id), min(i.id), bool_or(i.dedupe_key IS NOT NULL), bool_or(i.key IS NOT NULL)
    INTO ids, first_id, has_dedupe_keys, has_keys
    FROM (
        SELECT
            d.dedupe_key, coalesce(d.coalesce_key, d.ordering_key) AS key, nextval('pgoutbox.message_id_seq') AS id
        FROM unnest(drafts) AS d
        OFFSET 0
    ) AS i;
    IF first_id <= floor_id THEN
        PERFORM pgoutbox._refuse_id(first_id);
    END IF;
    IF has_dedupe_keys THEN
        known_ids := pgoutbox._take_dedupe_keys(drafts, ids);
    END IF;
    IF has_keys THEN
        taken := pgoutbox._take_keys(drafts, ids, known_ids);
        ids := taken.ids;
        older_ids := taken.older_ids;
        latest_at := taken.latest_at;
    END IF;

    INSERT INTO pgoutbox.message_live (
        id, topic, payload, queue, destination, owner, coalesce_key, ordering_key, dedupe_key, halts_key,
        available_at, expires_at, max_attempts, attempt_budget, headers, payload_version, content_id,
        resend_of, failure_of, fair_key, lane
    )
    SELECT
        ids[d.ordinality], d.topic, d.payload, coalesce(d.queue, 'default'), d.destination, d.owner, d.coalesce_key,
        d.ordering_key, d.dedupe_key, coalesce(d.halts_key, false), due.at,
        coalesce(d.expires_at, due.at + d.expires_after), coalesce(d.max_attempts, 11),
        coalesce(d.max_attempts, 11), d.headers, coalesce(d.payload_version, 1), _enqueue.content_id, _enqueue.resend_of,
        _enqueue.failure_of, d.fair_key, CASE WHEN d.fair_key IS NULL THEN 0 ELSE 2 END
    FROM unnest(drafts) WITH ORDINALITY AS d
    CROSS JOIN LATERAL (
        SELECT greatest(
            now(), least(greatest(now(), d.available_at, now() + d.delay), latest_at[d.ordinality])
        )
    ) AS due(at)
    WHERE known_ids[d.ordinality] IS NULL;
    IF older_ids IS NOT NULL THEN
        PERFORM pgoutbox._skip_superseded(older_ids);
    END IF;
    IF notify IS NOT FALSE THEN
        PERFORM pgoutbox._notify_workers(q.queue)
        FROM (
            SELECT DISTINCT coalesce(d.queue, 'default') AS queue
            FROM unnest(drafts) WITH ORDINALITY AS d
            WHERE known_ids[d.ordinality] IS NULL
        ) AS q;
    END IF;
    IF known_ids IS NULL THEN
        RETURN ids;
    END IF;
    RETURN ARRAY(
        SELECT CASE WHEN known_ids[n] < 0 THEN -ids[-known_ids[n]] ELSE coalesce(-known_ids[n], ids[n]) END
        FROM generate_subscripts(ids, 1) AS n
        ORDER BY n
    );
END
$function$;
