"""The outbox: message and its partitions, attempt, queue, coalesce, dedupe, and the functions enqueue and cancel.

Every statement stands alone, so that it runs on any driver of the host application. No statement contains a percent
sign or a colon followed by a word, which SQLAlchemy would take for a placeholder.
"""

from __future__ import annotations

from alembic import op

revision = "pgoutbox_0001"
down_revision = None
branch_labels = ("pgoutbox",)
depends_on = None

# CREATE SCHEMA IF NOT EXISTS asks for the right to create schemas even where there is nothing to create.
SCHEMA = """
DO $block$
BEGIN
    IF to_regnamespace('pgoutbox') IS NULL THEN
        CREATE SCHEMA pgoutbox;
    END IF;
END
$block$
"""

SCHEMA_COMMENT = (
    "COMMENT ON SCHEMA pgoutbox IS 'Transactional outbox: messages that committed transactions owe to the outside.'"
)

SCHEMA_VERSION = """
CREATE FUNCTION pgoutbox.schema_version()
RETURNS integer
LANGUAGE sql
IMMUTABLE
PARALLEL SAFE
AS 'SELECT 1'
"""

# CACHE 1 is part of the promise: with a larger cache a session would hand out ids that are older than those of a
# transaction which committed before, and the newest message of a key would not have the greatest id.
SEQUENCE = "CREATE SEQUENCE pgoutbox.message_id_seq AS bigint CACHE 1"

MESSAGE = """
CREATE TABLE pgoutbox.message (
    id                  bigint      NOT NULL DEFAULT nextval('pgoutbox.message_id_seq'),
    created_at          timestamptz NOT NULL DEFAULT now(),
    available_at        timestamptz NOT NULL DEFAULT now(),
    expires_at          timestamptz,
    claimed_at          timestamptz,
    lease_expires_at    timestamptz,
    cancel_requested_at timestamptz,
    finished_at         timestamptz,
    superseded_by       bigint,
    resend_of           bigint,
    attempt_count       integer     NOT NULL DEFAULT 0,
    max_attempts        integer     NOT NULL DEFAULT 11,
    attempt_budget      integer     NOT NULL DEFAULT 11,
    state               text        NOT NULL DEFAULT 'pending',
    topic               text        NOT NULL,
    queue               text        NOT NULL DEFAULT 'default',
    destination         text,
    coalesce_key        text,
    dedupe_key          text,
    worker              text,
    skip_reason         text,
    last_error          text,
    payload             jsonb       NOT NULL,
    headers             jsonb
) PARTITION BY LIST (state)
"""

# What a state requires is one CHECK per partition. PostgreSQL prepares the CHECKs of a table anew for every statement:
# eight of them on the parent made a single enqueue two and a half times as expensive (docs/decisions/0001).
MESSAGE_LIVE = """
CREATE TABLE pgoutbox.message_live PARTITION OF pgoutbox.message (
    CONSTRAINT message_live_pkey PRIMARY KEY (id),
    CONSTRAINT message_live_sound CHECK (
        CASE state
            WHEN 'pending' THEN lease_expires_at IS NULL
            ELSE lease_expires_at IS NOT NULL AND claimed_at IS NOT NULL AND worker IS NOT NULL AND attempt_count > 0
        END
        AND finished_at IS NULL
        AND attempt_count >= 0
        AND max_attempts > 0
        AND attempt_budget > 0
        AND created_at BETWEEN '2000-01-01 00:00Z' AND '9000-01-01 00:00Z'
        AND available_at BETWEEN '2000-01-01 00:00Z' AND '9000-01-01 00:00Z'
    )
) FOR VALUES IN ('pending', 'sending')
WITH (
    autovacuum_vacuum_threshold = 2000,
    autovacuum_vacuum_scale_factor = 0.02,
    autovacuum_vacuum_insert_scale_factor = 0.2,
    autovacuum_analyze_threshold = 5000,
    autovacuum_analyze_scale_factor = 0.1,
    autovacuum_vacuum_cost_delay = 1
)
"""

MESSAGE_FAILED = """
CREATE TABLE pgoutbox.message_failed PARTITION OF pgoutbox.message (
    CONSTRAINT message_failed_pkey PRIMARY KEY (id),
    CONSTRAINT message_failed_sound CHECK (
        finished_at IS NOT NULL AND lease_expires_at IS NULL AND attempt_count > 0 AND skip_reason IS NULL
    )
) FOR VALUES IN ('failed')
"""

MESSAGE_DONE = """
CREATE TABLE pgoutbox.message_done PARTITION OF pgoutbox.message (
    CONSTRAINT message_done_pkey PRIMARY KEY (id, finished_at),
    CONSTRAINT message_done_sound CHECK (
        lease_expires_at IS NULL
        AND (state <> 'sent' OR (attempt_count > 0 AND worker IS NOT NULL AND claimed_at IS NOT NULL))
        AND (state = 'skipped') = (skip_reason IS NOT NULL)
        AND (superseded_by IS NULL OR (state = 'skipped' AND superseded_by > id))
    )
) FOR VALUES IN ('sent', 'skipped', 'cancelled')
PARTITION BY RANGE (finished_at)
"""

MESSAGE_DONE_DEFAULT = "CREATE TABLE pgoutbox.message_done_default PARTITION OF pgoutbox.message_done DEFAULT"

# Block ranges are enough for retention, which reads old rows in bulk, and cost a finish almost nothing.
MESSAGE_DONE_FINISHED = "CREATE INDEX message_done_finished_at ON pgoutbox.message_done USING brin (finished_at)"

# The three lanes of a claim. Fresh messages, retries and what is in flight are read from different indexes, so that a
# backlog of the one never stands before the other.
LIVE_FRESH = """
CREATE INDEX message_live_fresh ON pgoutbox.message_live (queue, available_at, id)
WHERE attempt_count = 0
"""

LIVE_RETRY = """
CREATE INDEX message_live_retry ON pgoutbox.message_live (queue, available_at, id)
WHERE attempt_count > 0 AND state = 'pending'
"""

# A message in `sending` is due again when its lease ends: recovery needs no other list than this index. Its condition
# is the lease and not the state, by which a finish, too, could be planned to read it, where the primary key is meant.
LIVE_LEASE = """
CREATE INDEX message_live_lease ON pgoutbox.message_live (queue, lease_expires_at, id)
WHERE lease_expires_at IS NOT NULL
"""

# The guard of "two are never in flight at once": whatever two claims see, only one of them can commit.
LIVE_IN_FLIGHT = """
CREATE UNIQUE INDEX message_live_in_flight ON pgoutbox.message_live (topic, coalesce_key)
WHERE state = 'sending' AND coalesce_key IS NOT NULL
"""

ATTEMPT = """
CREATE TABLE pgoutbox.attempt (
    message_id    bigint      NOT NULL,
    attempt_count integer     NOT NULL,
    outcome       text        NOT NULL,
    worker        text        NOT NULL,
    started_at    timestamptz NOT NULL,
    ended_at      timestamptz NOT NULL,
    error         text,
    CONSTRAINT attempt_pkey PRIMARY KEY (message_id, attempt_count),
    CONSTRAINT attempt_outcome_known CHECK (
        outcome IN ('retry', 'failed', 'skipped', 'cancelled', 'snoozed', 'released', 'lost')
    )
)
"""

QUEUE = """
CREATE TABLE pgoutbox.queue (
    name      text        NOT NULL,
    paused_at timestamptz,
    CONSTRAINT queue_pkey PRIMARY KEY (name)
)
"""

# A bulk of updates to one narrow row each: free space on every page keeps them on the page (HOT).
COALESCE = """
CREATE TABLE pgoutbox.coalesce (
    newest_id    bigint NOT NULL,
    topic        text   NOT NULL,
    coalesce_key text   NOT NULL,
    CONSTRAINT coalesce_pkey PRIMARY KEY (topic, coalesce_key)
) WITH (fillfactor = 70)
"""

DEDUPE = """
CREATE TABLE pgoutbox.dedupe (
    message_id     bigint      NOT NULL,
    created_at     timestamptz NOT NULL DEFAULT now(),
    topic          text        NOT NULL,
    dedupe_key     text        NOT NULL,
    payload_digest bytea       NOT NULL,
    CONSTRAINT dedupe_pkey PRIMARY KEY (topic, dedupe_key)
)
"""

# The most specific rule holds: that of the topic, or else that of all topics. Without a rule nothing is deleted.
RETENTION = """
CREATE TABLE pgoutbox.retention (
    keep  interval,
    topic text     NOT NULL,
    state text     NOT NULL,
    CONSTRAINT retention_pkey PRIMARY KEY (topic, state),
    CONSTRAINT retention_topic_sound CHECK (topic = '*' OR (length(topic) <= 63 AND topic ~ '^[a-z][a-z0-9_.-]*$')),
    CONSTRAINT retention_state_known CHECK (state IN ('sent', 'failed', 'skipped', 'cancelled', 'dedupe_key')),
    CONSTRAINT retention_keep_sound CHECK (keep >= interval '0' AND keep <= interval '36500 days')
)
"""

# One expression without sub-select, so that PostgreSQL folds it into its caller: the single and the bulk path check by
# the same rules at the price of an IF. A bounded repetition in a regular expression costs ten times an unbounded one.
ARGUMENT_ERROR = r"""
CREATE FUNCTION pgoutbox.argument_error(
    topic text,
    payload jsonb,
    queue text,
    destination text,
    coalesce_key text,
    dedupe_key text,
    available_at timestamptz,
    expires_at timestamptz,
    headers jsonb,
    max_attempts integer
)
RETURNS text
LANGUAGE sql
STABLE
PARALLEL SAFE
AS $function$
SELECT CASE
    WHEN topic IS NULL THEN 'topic: must not be null'
    WHEN length(topic) > 63 OR topic !~ '^[a-z][a-z0-9_.-]*$'
        THEN 'topic: must be 1 to 63 of a-z, 0-9, underscore, dot and hyphen, the first a letter'
    WHEN payload IS NULL THEN 'payload: must not be null (the JSON value null is accepted)'
    WHEN queue IS NULL THEN 'queue: must not be null'
    WHEN length(queue) > 63 OR queue !~ '^[a-z][a-z0-9_.-]*$'
        THEN 'queue: must be 1 to 63 of a-z, 0-9, underscore, dot and hyphen, the first a letter'
    WHEN max_attempts IS NULL THEN 'max_attempts: must not be null'
    WHEN max_attempts NOT BETWEEN 1 AND 10000 THEN 'max_attempts: must be from 1 to 10000'
    WHEN octet_length(coalesce_key) > 512 THEN 'coalesce_key: must not be longer than 512 bytes'
    WHEN octet_length(dedupe_key) > 512 THEN 'dedupe_key: must not be longer than 512 bytes'
    WHEN octet_length(destination) > 2048 OR destination !~ '^[A-Za-z][A-Za-z0-9+.-]*:[^[:cntrl:]]+$'
        THEN 'destination: must be a URI such as mailto:a@example.org, without control characters, of at most 2048 '
            'bytes'
    WHEN available_at IS NOT NULL AND NOT isfinite(available_at) THEN 'available_at: must be finite'
    WHEN available_at > now() + interval '10 years' THEN 'available_at: must not be more than 10 years ahead'
    WHEN expires_at IS NOT NULL AND (NOT isfinite(expires_at) OR expires_at > now() + interval '20 years')
        THEN 'expires_at: must be finite and not more than 20 years ahead'
    WHEN expires_at <= greatest(available_at, now()) THEN 'expires_at: must be later than now and than available_at'
    WHEN headers IS NOT NULL AND jsonb_typeof(headers) <> 'object' THEN 'headers: must be a JSON object of texts'
    WHEN headers IS NOT NULL AND jsonb_path_exists(headers, '$.* ? (@.type() != "string")')
        THEN 'headers: must be a JSON object of texts'
    WHEN headers IS NOT NULL AND jsonb_array_length(jsonb_path_query_array(headers, '$.keyvalue()')) > 64
        THEN 'headers: must not have more than 64 entries'
    WHEN headers IS NOT NULL AND (
        jsonb_path_exists(headers, '$.* ? (@ like_regex "[[:cntrl:]]")')
        OR jsonb_path_exists(headers, '$.keyvalue() ? (@.key like_regex "^$|[[:cntrl:]]")')
    ) THEN 'headers: must not have empty names, nor control characters in names or values'
END
$function$
"""

RAISE_ARGUMENT_ERROR = """
CREATE FUNCTION pgoutbox.raise_argument_error(problem text, item_index integer DEFAULT NULL)
RETURNS void
LANGUAGE plpgsql
AS $function$
BEGIN
    RAISE EXCEPTION USING
        ERRCODE = CASE WHEN strpos(problem, 'must not be null') > 0 THEN '22004' ELSE '22023' END,
        SCHEMA = 'pgoutbox',
        COLUMN = split_part(problem, ':', 1),
        MESSAGE = 'pgoutbox.enqueue: '
            || CASE WHEN item_index IS NULL THEN '' ELSE 'items[' || item_index || '].' END
            || problem;
END
$function$
"""

# NOTIFY takes a database-wide lock at commit, so an enqueue rings only while a sleeping worker has the bell armed, that
# is, holds this advisory lock exclusively. An enqueue that does not ring holds the lock shared until its row is
# visible; the worker gets it only after that, and looks once more before it sleeps. 1885826146 is "pgob" in ASCII.
RING = """
CREATE FUNCTION pgoutbox.ring(queue text)
RETURNS void
LANGUAGE plpgsql
AS $function$
BEGIN
    IF NOT pg_catalog.pg_try_advisory_xact_lock_shared(1885826146, pg_catalog.hashtext(queue)) THEN
        PERFORM pg_catalog.pg_notify('pgoutbox', queue);
    END IF;
END
$function$
"""

# Volatile, so that it sees what was committed after the statement began that calls it.
NEWEST_ID = """
CREATE FUNCTION pgoutbox.newest_id(p_topic text, p_coalesce_key text)
RETURNS bigint
LANGUAGE plpgsql
VOLATILE
AS $function$
BEGIN
    RETURN (
        SELECT head.newest_id
        FROM pgoutbox.coalesce AS head
        WHERE head.topic OPERATOR(pg_catalog.=) p_topic AND head.coalesce_key OPERATOR(pg_catalog.=) p_coalesce_key
    );
END
$function$
"""

# What most messages are. Enough, because what is not plain here is judged by argument_error. The body is bound when the
# function is made, and PostgreSQL puts it in the place of the call.
IS_PLAIN = """
CREATE FUNCTION pgoutbox.is_plain(
    topic text,
    payload jsonb,
    queue text,
    destination text,
    coalesce_key text,
    dedupe_key text,
    available_at timestamptz,
    expires_at timestamptz,
    headers jsonb,
    max_attempts integer
)
RETURNS boolean
LANGUAGE sql
IMMUTABLE
PARALLEL SAFE
RETURN pg_catalog.num_nonnulls(destination, coalesce_key, dedupe_key, available_at, expires_at, headers)
        OPERATOR(pg_catalog.=) 0
    AND topic OPERATOR(pg_catalog.~) '^[a-z][a-z0-9_.-]*$'
    AND queue OPERATOR(pg_catalog.~) '^[a-z][a-z0-9_.-]*$'
    AND pg_catalog.length(topic) OPERATOR(pg_catalog.<=) 63
    AND pg_catalog.length(queue) OPERATOR(pg_catalog.<=) 63
    AND payload IS NOT NULL
    AND max_attempts OPERATOR(pg_catalog.>=) 1
    AND max_attempts OPERATOR(pg_catalog.<=) 10000
"""

# The one place that writes a new message, and the doorbell. It has no settings of its own, which would cost as much as
# a twentieth of an INSERT: every name in it is qualified instead.
WRITE_MESSAGE = """
CREATE FUNCTION pgoutbox.write_message(
    p_id bigint,
    p_topic text,
    p_payload jsonb,
    p_queue text,
    p_destination text,
    p_coalesce_key text,
    p_dedupe_key text,
    p_available_at timestamptz,
    p_expires_at timestamptz,
    p_headers jsonb,
    p_max_attempts integer,
    p_notify boolean
)
RETURNS bigint
LANGUAGE plpgsql
AS $function$
BEGIN
    INSERT INTO pgoutbox.message_live (
        id, topic, payload, queue, destination, coalesce_key, dedupe_key,
        available_at, expires_at, headers, max_attempts, attempt_budget
    ) VALUES (
        p_id, p_topic, p_payload, p_queue, p_destination, p_coalesce_key, p_dedupe_key,
        greatest(p_available_at, pg_catalog.now()), p_expires_at, p_headers, p_max_attempts, p_max_attempts
    );
    IF p_notify AND NOT pg_catalog.pg_try_advisory_xact_lock_shared(1885826146, pg_catalog.hashtext(p_queue)) THEN
        PERFORM pg_catalog.pg_notify('pgoutbox', p_queue);
    END IF;
    RETURN p_id;
END
$function$
"""

# What may be wrong or has a key. The answer is one number, not a row: to build a row costs as much as to call the
# function. The id is negative when the message already existed.
ENQUEUE_CHECKED = """
CREATE FUNCTION pgoutbox.enqueue_checked(
    p_topic text,
    p_payload jsonb,
    p_queue text,
    p_destination text,
    p_coalesce_key text,
    p_dedupe_key text,
    p_available_at timestamptz,
    p_expires_at timestamptz,
    p_headers jsonb,
    p_max_attempts integer,
    p_notify boolean
)
RETURNS bigint
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    new_id bigint;
    problem text;
    digests bytea[];
    known_id bigint;
    known_digest bytea;
BEGIN
    problem := pgoutbox.argument_error(
        p_topic, p_payload, p_queue, p_destination, p_coalesce_key, p_dedupe_key,
        p_available_at, p_expires_at, p_headers, p_max_attempts
    );
    IF problem IS NOT NULL THEN
        PERFORM pgoutbox.raise_argument_error(problem);
    END IF;
    new_id := nextval('pgoutbox.message_id_seq');

    IF p_dedupe_key IS NOT NULL THEN
        IF p_payload -> 'pgoutbox.encrypted' IS NOT NULL THEN
            -- The same payload is encrypted to another text each time. It brings digests of its own, one for each key
            -- of its producer; any of them tells a repetition, so that keys can be exchanged.
            SELECT array_agg(sha256(convert_to('digest ' || (d.digest #>> '{}'), 'UTF8')) ORDER BY d.ordinality)
            INTO digests
            FROM jsonb_path_query(
                p_payload, 'strict $."pgoutbox.encrypted"."digests"[*] ? (@.type() == "string")', '{}', true
            ) WITH ORDINALITY AS d(digest, ordinality);
        END IF;
        digests := coalesce(digests, ARRAY[sha256(convert_to(p_payload::text, 'UTF8'))]);
        LOOP
            -- Waits for a transaction that is inserting the same key; inserts after all if that one rolls back.
            INSERT INTO pgoutbox.dedupe (message_id, topic, dedupe_key, payload_digest)
            VALUES (new_id, p_topic, p_dedupe_key, digests[1])
            ON CONFLICT ON CONSTRAINT dedupe_pkey DO NOTHING;
            EXIT WHEN FOUND;
            SELECT d.message_id, d.payload_digest
            INTO known_id, known_digest
            FROM pgoutbox.dedupe AS d
            WHERE d.topic = p_topic AND d.dedupe_key = p_dedupe_key;
            IF FOUND AND known_digest = ANY (digests) THEN
                RETURN -known_id;
            ELSIF FOUND THEN
                RAISE EXCEPTION USING
                    ERRCODE = 'unique_violation',
                    SCHEMA = 'pgoutbox',
                    TABLE = 'dedupe',
                    CONSTRAINT = 'dedupe_payload',
                    COLUMN = 'dedupe_key',
                    MESSAGE = 'pgoutbox.enqueue: dedupe_key: message ' || known_id || ' of topic ' || p_topic
                        || ' has this key and another payload';
            END IF;
        END LOOP;
    END IF;

    IF p_coalesce_key IS NOT NULL THEN
        -- The id is drawn while the head row is locked: among the messages of one key, the order of ids is the
        -- order of commits, and "superseded" is the question whether the head names a greater id.
        INSERT INTO pgoutbox.coalesce AS head (newest_id, topic, coalesce_key)
        VALUES (new_id, p_topic, p_coalesce_key)
        ON CONFLICT ON CONSTRAINT coalesce_pkey DO UPDATE SET newest_id = nextval('pgoutbox.message_id_seq')
        RETURNING head.newest_id INTO new_id;
        IF p_dedupe_key IS NOT NULL THEN
            UPDATE pgoutbox.dedupe AS d
            SET message_id = new_id
            WHERE d.topic = p_topic AND d.dedupe_key = p_dedupe_key;
        END IF;
    END IF;

    RETURN pgoutbox.write_message(
        new_id, p_topic, p_payload, p_queue, p_destination, p_coalesce_key, p_dedupe_key,
        p_available_at, p_expires_at, p_headers, p_max_attempts, p_notify
    );
END
$function$
"""

# PostgreSQL puts the bodies of this function and the next in the place of the call, so that they cost nothing.
ENQUEUE_RECEIPT = """
CREATE FUNCTION pgoutbox.enqueue_receipt(
    topic text,
    payload jsonb,
    queue text,
    destination text,
    coalesce_key text,
    dedupe_key text,
    available_at timestamptz,
    expires_at timestamptz,
    headers jsonb,
    max_attempts integer,
    notify boolean
)
RETURNS bigint
LANGUAGE sql
RETURN CASE
    WHEN pgoutbox.is_plain(
        topic, payload, queue, destination, coalesce_key, dedupe_key, available_at, expires_at, headers, max_attempts
    ) THEN pgoutbox.write_message(
        pg_catalog.nextval('pgoutbox.message_id_seq'), topic, payload, queue, NULL, NULL, NULL,
        NULL, NULL, NULL, max_attempts, notify
    )
    ELSE pgoutbox.enqueue_checked(
        topic, payload, queue, destination, coalesce_key, dedupe_key,
        available_at, expires_at, headers, max_attempts, notify
    )
END
"""

ENQUEUE = """
CREATE FUNCTION pgoutbox.enqueue(
    topic text,
    payload jsonb,
    queue text DEFAULT 'default',
    destination text DEFAULT NULL,
    coalesce_key text DEFAULT NULL,
    dedupe_key text DEFAULT NULL,
    available_at timestamptz DEFAULT NULL,
    expires_at timestamptz DEFAULT NULL,
    headers jsonb DEFAULT NULL,
    max_attempts integer DEFAULT 11,
    notify boolean DEFAULT true
)
RETURNS bigint
LANGUAGE sql
RETURN pg_catalog.abs(pgoutbox.enqueue_receipt(
    topic, payload, queue, destination, coalesce_key, dedupe_key,
    available_at, expires_at, headers, max_attempts, notify
))
"""

ENQUEUE_MANY = """
CREATE FUNCTION pgoutbox.enqueue_many(
    topics text[],
    payloads jsonb[],
    queues text[] DEFAULT NULL,
    destinations text[] DEFAULT NULL,
    coalesce_keys text[] DEFAULT NULL,
    dedupe_keys text[] DEFAULT NULL,
    available_ats timestamptz[] DEFAULT NULL,
    delays double precision[] DEFAULT NULL,
    expires_ats timestamptz[] DEFAULT NULL,
    headers jsonb[] DEFAULT NULL,
    max_attempts integer[] DEFAULT NULL,
    notify boolean DEFAULT true
)
RETURNS TABLE (item_index integer, id bigint, duplicate boolean)
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $function$
#variable_conflict use_column
DECLARE
    item record;
    bad record;
    receipt bigint;
BEGIN
    IF topics IS NULL THEN
        PERFORM pgoutbox.raise_argument_error('topics: must not be null');
    END IF;
    IF cardinality(payloads) IS DISTINCT FROM cardinality(topics) THEN
        PERFORM pgoutbox.raise_argument_error('payloads: must have as many elements as topics');
    END IF;
    IF greatest(
        cardinality(queues), cardinality(destinations), cardinality(coalesce_keys), cardinality(dedupe_keys),
        cardinality(available_ats), cardinality(delays), cardinality(expires_ats), cardinality(headers),
        cardinality(max_attempts)
    ) > cardinality(topics) THEN
        PERFORM pgoutbox.raise_argument_error('topics: no other array may have more elements');
    END IF;

    SELECT (i.ordinality - 1)::integer AS item_index, i.problem
    INTO bad
    FROM (
        SELECT a.ordinality, pgoutbox.argument_error(
            a.topic, a.payload, coalesce(a.queue, 'default'), a.destination, a.coalesce_key, a.dedupe_key,
            coalesce(a.available_at, now() + make_interval(secs => a.delay)), a.expires_at, a.headers,
            coalesce(a.max_attempts, 11)
        ) AS problem
        FROM unnest(
            topics, payloads, queues, destinations, coalesce_keys, dedupe_keys,
            available_ats, delays, expires_ats, headers, max_attempts
        ) WITH ORDINALITY AS a(
            topic, payload, queue, destination, coalesce_key, dedupe_key,
            available_at, delay, expires_at, headers, max_attempts, ordinality
        )
    ) AS i
    WHERE i.problem IS NOT NULL
    ORDER BY i.ordinality
    LIMIT 1;
    IF FOUND THEN
        PERFORM pgoutbox.raise_argument_error(bad.problem, bad.item_index);
    END IF;

    RETURN QUERY
    WITH item AS MATERIALIZED (
        SELECT a.*, nextval('pgoutbox.message_id_seq') AS id
        FROM unnest(
            topics, payloads, queues, destinations, coalesce_keys, dedupe_keys,
            available_ats, delays, expires_ats, headers, max_attempts
        ) WITH ORDINALITY AS a(
            topic, payload, queue, destination, coalesce_key, dedupe_key,
            available_at, delay, expires_at, headers, max_attempts, ordinality
        )
        WHERE a.coalesce_key IS NULL AND a.dedupe_key IS NULL
    ), inserted AS (
        INSERT INTO pgoutbox.message_live (
            id, topic, payload, queue, destination, available_at, expires_at, headers, max_attempts, attempt_budget
        )
        SELECT
            i.id, i.topic, i.payload, coalesce(i.queue, 'default'), i.destination,
            greatest(i.available_at, now() + make_interval(secs => i.delay), now()), i.expires_at, i.headers,
            coalesce(i.max_attempts, 11), coalesce(i.max_attempts, 11)
        FROM item AS i
        ORDER BY i.ordinality
    )
    SELECT (i.ordinality - 1)::integer, i.id, false
    FROM item AS i;

    -- Messages of one coalesce key keep their order, so that the last one is the newest. Every transaction takes the
    -- keys in one order, so that two bulks do not wait for each other in a circle (unless messages with both keys
    -- combine them differently; then PostgreSQL ends one of the two).
    FOR item IN
        SELECT a.*
        FROM unnest(
            topics, payloads, queues, destinations, coalesce_keys, dedupe_keys,
            available_ats, delays, expires_ats, headers, max_attempts
        ) WITH ORDINALITY AS a(
            topic, payload, queue, destination, coalesce_key, dedupe_key,
            available_at, delay, expires_at, headers, max_attempts, ordinality
        )
        WHERE a.coalesce_key IS NOT NULL OR a.dedupe_key IS NOT NULL
        ORDER BY
            a.topic COLLATE "C",
            a.coalesce_key COLLATE "C",
            CASE WHEN a.coalesce_key IS NULL THEN a.dedupe_key END COLLATE "C",
            a.ordinality
    LOOP
        receipt := pgoutbox.enqueue_checked(
            item.topic, item.payload, coalesce(item.queue, 'default'), item.destination,
            item.coalesce_key, item.dedupe_key, coalesce(item.available_at, now() + make_interval(secs => item.delay)),
            item.expires_at, item.headers, coalesce(item.max_attempts, 11), false
        );
        item_index := item.ordinality - 1;
        id := abs(receipt);
        duplicate := receipt < 0;
        RETURN NEXT;
    END LOOP;

    IF notify THEN
        PERFORM pgoutbox.ring(r.queue)
        FROM (
            SELECT DISTINCT coalesce(q.queue, 'default') AS queue
            FROM unnest(topics, queues) AS q(topic, queue)
        ) AS r;
    END IF;
END
$function$
"""

CANCEL = """
CREATE FUNCTION pgoutbox.cancel(message_id bigint)
RETURNS text
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    found_state text;
BEGIN
    IF message_id IS NULL THEN
        RAISE EXCEPTION USING
            ERRCODE = '22004', SCHEMA = 'pgoutbox', COLUMN = 'message_id',
            MESSAGE = 'pgoutbox.cancel: message_id: must not be null';
    END IF;
    -- A worker locks a row only for the length of one statement. Nothing here waits for a row: a wait that ends with
    -- the row in another partition would fail the caller's whole transaction.
    FOR trial IN 1..50 LOOP
        BEGIN
            SELECT m.state
            INTO found_state
            FROM pgoutbox.message AS m
            WHERE m.id = message_id AND m.state IN ('pending', 'sending')
            FOR UPDATE SKIP LOCKED;
            IF found_state = 'pending' THEN
                UPDATE pgoutbox.message AS m
                SET state = 'cancelled', finished_at = clock_timestamp()
                WHERE m.id = message_id AND m.state = 'pending';
                RETURN 'cancelled';
            ELSIF found_state = 'sending' THEN
                UPDATE pgoutbox.message AS m
                SET cancel_requested_at = coalesce(m.cancel_requested_at, clock_timestamp())
                WHERE m.id = message_id AND m.state = 'sending';
                RETURN 'requested';
            END IF;
        EXCEPTION WHEN serialization_failure THEN
            IF current_setting('transaction_isolation') <> 'read committed' THEN
                RAISE;
            END IF;
        END;
        SELECT m.state INTO found_state FROM pgoutbox.message AS m WHERE m.id = message_id;
        IF NOT FOUND THEN
            RETURN 'missing';
        ELSIF found_state NOT IN ('pending', 'sending') THEN
            RETURN found_state;
        END IF;
        PERFORM pg_sleep(0.002);
    END LOOP;
    RETURN 'locked';
END
$function$
"""

TABLE_COMMENTS = {
    "message": "One row per message, partitioned by state: live (pending, sending), failed, done (the others).",
    "message_live": "Messages still owed: pending and sending.",
    "message_failed": "Messages that failed for good; they wait for a person (redrive or prune).",
    "message_done": "Messages that need nothing more: sent, skipped, cancelled. Partitioned by time for retention.",
    "attempt": "The attempts that did not end sent, with their errors. A sent message carries its own last attempt.",
    "queue": "Settings of a queue. A queue without a row has no limits.",
    "retention": "How long final messages are kept, by topic and state. Without a rule they are kept for ever.",
    "coalesce": "For each topic and coalesce key the newest message; an older one is superseded.",
    "dedupe": "For each topic and dedupe key the one message that exists for it.",
}

COLUMN_COMMENTS = {
    "message": {
        "id": "Grows with every enqueue; within one coalesce key the order of ids is the order of commits.",
        "created_at": "Start of the transaction that enqueued the message.",
        "available_at": "When a pending message may be claimed.",
        "expires_at": "When a message that is not yet handed over is skipped instead.",
        "claimed_at": "Start of the last attempt.",
        "lease_expires_at": "When the attempt in flight counts as lost unless its worker renews the lease.",
        "cancel_requested_at": "When cancel met an attempt in flight: it is told, and not retried.",
        "finished_at": "When the message reached its final state.",
        "superseded_by": "The newer message of the same coalesce key because of which this one was skipped.",
        "resend_of": "The message that an operator sent again with this one.",
        "attempt_count": "Number of attempts so far, and the fencing token: up by one at each claim, never down.",
        "max_attempts": "The attempt after which a transient failure is final. Snooze, release and redrive raise it.",
        "attempt_budget": "How many attempts enqueue granted; each redrive grants as many again.",
        "state": "pending, sending, sent, failed, skipped or cancelled.",
        "topic": "What the message is; picks the handler.",
        "queue": "Who works on it, in which order and within which limits.",
        "destination": "Where it goes, as a URI.",
        "coalesce_key": "Of the messages with one topic and coalesce key only the newest committed one is delivered.",
        "dedupe_key": "There is at most one message with one topic and dedupe key.",
        "worker": "The worker that holds or last held the message.",
        "skip_reason": "Why a skipped message was skipped.",
        "last_error": "The error of the last attempt that failed, cut at 4000 characters.",
        "payload": "What the handler needs to render and send. Holds no usable secret.",
        "headers": "Texts that travel with the message, for example a trace context.",
    },
    "attempt": {
        "message_id": "The message.",
        "attempt_count": "Number of the attempt: its fencing token.",
        "outcome": "retry, failed, skipped, cancelled, snoozed, released or lost.",
        "worker": "The worker that made the attempt.",
        "started_at": "When it was claimed.",
        "ended_at": "When its outcome was written.",
        "error": "What went wrong, cut at 4000 characters.",
    },
    "queue": {
        "name": "The name that messages carry in the column queue.",
        "paused_at": "While set, nothing in this queue is claimed.",
    },
    "retention": {
        "keep": "How long; zero deletes sent messages as they are sent, and null keeps them for ever.",
        "topic": "A topic, or * for every topic without a rule of its own for the state.",
        "state": "sent, failed, skipped or cancelled; or dedupe_key, for keys whose message is deleted.",
    },
    "coalesce": {
        "newest_id": "The newest committed message of the key.",
        "topic": "The topic.",
        "coalesce_key": "The key.",
    },
    "dedupe": {
        "message_id": "The message that exists for the key.",
        "created_at": "When the key was first used.",
        "topic": "The topic.",
        "dedupe_key": "The key.",
        "payload_digest": "SHA-256 of the payload, or of the digest in an encrypted one, to tell a repetition from a "
        "mistake.",
    },
}

FUNCTION_COMMENTS = {
    "schema_version()": "The version of this schema; workers refuse an older one than they need.",
    "enqueue": "Write one message in this transaction and wake a sleeping worker when it commits. Returns the id; "
    "with a dedupe key that is taken, the id of the existing message.",
    "enqueue_many": "Enqueue arrays of messages in this transaction; a null array or element means the default.",
    "enqueue_receipt": "What enqueue does, without defaults. The id is negative when the message already existed.",
    "enqueue_checked": "enqueue_receipt for what has keys, options or mistakes.",
    "write_message": "Insert one sound message and wake a sleeping worker when the transaction commits.",
    "is_plain": "Whether nothing but topic, payload, queue and max_attempts is given, and these are sound.",
    "cancel": "Cancel a message in this transaction. Returns cancelled, requested (it is in flight: told, and not "
    "retried), the final state it already has, locked (its row stayed locked: try again) or missing.",
    "argument_error": "The first thing wrong with the arguments of enqueue, as name and reason; null when all is well.",
    "raise_argument_error": "Raise 22004 or 22023 with the name of the argument as column.",
    "newest_id": "The newest message of a coalesce key, as of now and not as of the calling statement.",
    "ring": "Wake the sleeping workers of a queue when this transaction commits.",
}

FUNCTIONS = (
    SCHEMA_VERSION,
    ARGUMENT_ERROR,
    IS_PLAIN,
    RAISE_ARGUMENT_ERROR,
    RING,
    NEWEST_ID,
    WRITE_MESSAGE,
    ENQUEUE_CHECKED,
    ENQUEUE_RECEIPT,
    ENQUEUE,
    ENQUEUE_MANY,
    CANCEL,
)

REVOKE = "REVOKE ALL ON ALL FUNCTIONS IN SCHEMA pgoutbox FROM PUBLIC"

DOWN = (
    "DROP FUNCTION pgoutbox.cancel",
    "DROP FUNCTION pgoutbox.enqueue_many",
    "DROP FUNCTION pgoutbox.enqueue",
    "DROP FUNCTION pgoutbox.enqueue_receipt",
    "DROP FUNCTION pgoutbox.enqueue_checked",
    "DROP FUNCTION pgoutbox.write_message",
    "DROP FUNCTION pgoutbox.ring",
    "DROP FUNCTION pgoutbox.newest_id",
    "DROP FUNCTION pgoutbox.raise_argument_error",
    "DROP FUNCTION pgoutbox.is_plain",
    "DROP FUNCTION pgoutbox.argument_error",
    "DROP TABLE pgoutbox.retention",
    "DROP TABLE pgoutbox.dedupe",
    "DROP TABLE pgoutbox.coalesce",
    "DROP TABLE pgoutbox.queue",
    "DROP TABLE pgoutbox.attempt",
    "DROP TABLE pgoutbox.message",
    "DROP FUNCTION pgoutbox.schema_version",
)

# The version table of a stand-alone installation lives in the schema too; then the schema stays.
DROP_SCHEMA_IF_EMPTY = """
DO $block$
BEGIN
    IF NOT EXISTS (SELECT FROM pg_catalog.pg_class WHERE relnamespace = 'pgoutbox'::regnamespace)
        AND NOT EXISTS (SELECT FROM pg_catalog.pg_proc WHERE pronamespace = 'pgoutbox'::regnamespace)
        AND NOT EXISTS (SELECT FROM pg_catalog.pg_type WHERE typnamespace = 'pgoutbox'::regnamespace)
    THEN
        DROP SCHEMA pgoutbox;
    END IF;
END
$block$
"""


def upgrade() -> None:
    for statement in (
        SCHEMA, SCHEMA_COMMENT, SEQUENCE, MESSAGE, MESSAGE_LIVE, MESSAGE_FAILED, MESSAGE_DONE, MESSAGE_DONE_DEFAULT,
        MESSAGE_DONE_FINISHED, LIVE_FRESH, LIVE_RETRY, LIVE_LEASE, LIVE_IN_FLIGHT, ATTEMPT, QUEUE, COALESCE, DEDUPE,
        RETENTION,
        *FUNCTIONS, REVOKE,
    ):  # fmt: skip
        op.execute(statement)
    op.execute("ALTER SEQUENCE pgoutbox.message_id_seq OWNED BY pgoutbox.message.id")
    for table, comment in TABLE_COMMENTS.items():
        op.execute(f"COMMENT ON TABLE pgoutbox.{table} IS '{comment}'")
    for table, columns in COLUMN_COMMENTS.items():
        for column, comment in columns.items():
            op.execute(f"COMMENT ON COLUMN pgoutbox.{table}.{column} IS '{comment}'")
    for function, comment in FUNCTION_COMMENTS.items():
        op.execute(f"COMMENT ON FUNCTION pgoutbox.{function} IS '{comment}'")


def downgrade() -> None:
    for statement in DOWN:
        op.execute(statement)
    op.execute(DROP_SCHEMA_IF_EMPTY)
