"""The outbox: message and its partitions, attempt, queue, coalesce, dedupe, breaker, and the functions enqueue and
cancel.

Each string is one statement, so that it runs on any driver of the host application. No statement contains a percent
sign or a colon followed by a word, which SQLAlchemy would treat as a placeholder.
"""

from __future__ import annotations

from alembic import op

revision = "pgoutbox_0001"
down_revision = None
branch_labels = ("pgoutbox",)
depends_on = None

# CREATE SCHEMA IF NOT EXISTS needs the privilege to create schemas even if the schema exists.
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
    "COMMENT ON SCHEMA pgoutbox IS 'Transactional outbox: messages of committed transactions to external receivers.'"
)

SCHEMA_VERSION = """
CREATE FUNCTION pgoutbox.schema_version()
RETURNS integer
LANGUAGE sql
IMMUTABLE
PARALLEL SAFE
AS 'SELECT 1'
"""

# CACHE 1 is part of the guarantee: with a larger cache a session could draw ids that are smaller than the ids of a
# transaction that committed before, and the newest message of a key would not have the greatest id.
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
    content_id          bigint,
    attempt_count       integer     NOT NULL DEFAULT 0,
    max_attempts        integer     NOT NULL DEFAULT 11,
    attempt_budget      integer     NOT NULL DEFAULT 11,
    coalesces_pending   boolean,
    state               text        NOT NULL DEFAULT 'pending',
    topic               text COLLATE "C" NOT NULL,
    queue               text COLLATE "C" NOT NULL DEFAULT 'default',
    destination         text,
    coalesce_key        text COLLATE "C",
    dedupe_key          text COLLATE "C",
    ordering_key        text COLLATE "C",
    on_failed           text,
    worker              text,
    skip_reason         text,
    last_error          text,
    payload             jsonb,
    headers             jsonb
) PARTITION BY LIST (state)
"""

# A claim writes a new version of the row. Half of each page is left free for these versions: on the same page,
# PostgreSQL logs only the change, and elsewhere the whole row and a lock of the old version (docs/decisions/0024).
#
# Each partition has one CHECK for its states. PostgreSQL prepares the CHECKs of a table again for every statement:
# eight of them on the parent made a single enqueue two and a half times as expensive (docs/decisions/0001).
MESSAGE_LIVE = """
CREATE TABLE pgoutbox.message_live PARTITION OF pgoutbox.message (
    CONSTRAINT message_live_pkey PRIMARY KEY (id),
    CONSTRAINT message_live_sound CHECK (
        CASE state
            WHEN 'pending'
                THEN lease_expires_at IS NULL AND cancel_requested_at IS NULL AND attempt_count < max_attempts
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
    fillfactor = 50,
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

# The three lanes of a claim. Fresh messages, retries and messages in flight are read from different indexes, so that a
# backlog of one never delays another.
LIVE_FRESH = """
CREATE INDEX message_live_fresh ON pgoutbox.message_live (queue, available_at, id)
WHERE attempt_count = 0 AND ordering_key IS NULL
"""

LIVE_RETRY = """
CREATE INDEX message_live_retry ON pgoutbox.message_live (queue, available_at, id)
WHERE attempt_count > 0 AND state = 'pending' AND ordering_key IS NULL
"""

# A message in `sending` is due again when its lease ends: recovery needs only this index. Its condition is the lease
# and not the state: with the state, the planner could use it for a finish instead of the primary key.
LIVE_LEASE = """
CREATE INDEX message_live_lease ON pgoutbox.message_live (queue, lease_expires_at, id)
WHERE lease_expires_at IS NOT NULL
"""

# The guard of "two are never in flight at once": whatever the snapshots of two claims, only one of them can commit.
LIVE_IN_FLIGHT = """
CREATE UNIQUE INDEX message_live_in_flight ON pgoutbox.message_live (topic, coalesce_key)
WHERE state = 'sending' AND coalesce_key IS NOT NULL
"""

# A claim looks here for the message that supersedes another by the rule `pending`: the one that fell due last.
LIVE_NEWER = """
CREATE INDEX message_live_newer ON pgoutbox.message_live (topic, coalesce_key, queue, available_at, id)
WHERE coalesces_pending AND state = 'pending'
"""

# Messages with an ordering key have their own lane. A claim reads only the first message of each key, and none of the
# messages behind it.
LIVE_ORDERED = """
CREATE INDEX message_live_ordered ON pgoutbox.message_live (queue, ordering_key, id)
WHERE ordering_key IS NOT NULL
"""

LIVE_ORDERED_DUE = """
CREATE INDEX message_live_ordered_due ON pgoutbox.message_live (queue, available_at)
WHERE ordering_key IS NOT NULL AND state = 'pending'
"""

LIVE_ORDERED_IN_FLIGHT = """
CREATE UNIQUE INDEX message_live_ordered_in_flight ON pgoutbox.message_live (queue, ordering_key)
WHERE ordering_key IS NOT NULL AND state = 'sending'
"""

FAILED_HALTS = """
CREATE INDEX message_failed_halts ON pgoutbox.message_failed (queue, ordering_key, id)
WHERE on_failed = 'halt'
"""

# Maintenance asks by key whether a message is left that a redrive can make pending again. Only failed and cancelled
# messages are in these indexes, so that enqueue, claim and a finish as sent never write them.
FAILED_COALESCED = """
CREATE INDEX message_failed_coalesced ON pgoutbox.message_failed (topic, coalesce_key)
WHERE coalesce_key IS NOT NULL
"""

FAILED_ORDERED = """
CREATE INDEX message_failed_ordered ON pgoutbox.message_failed (queue, ordering_key)
WHERE ordering_key IS NOT NULL
"""

CANCELLED_COALESCED = """
CREATE INDEX message_done_coalesced ON pgoutbox.message_done (topic, coalesce_key)
WHERE state = 'cancelled' AND coalesce_key IS NOT NULL
"""

CANCELLED_ORDERED = """
CREATE INDEX message_done_ordered ON pgoutbox.message_done (queue, ordering_key)
WHERE state = 'cancelled' AND ordering_key IS NOT NULL
"""

MESSAGE_CONTENT = "CREATE INDEX message_content ON pgoutbox.message (content_id) WHERE content_id IS NOT NULL"

# The shared content of a fan-out is stored once, and deleted with its last message.
CONTENT = """
CREATE TABLE pgoutbox.content (
    id         bigint      GENERATED ALWAYS AS IDENTITY,
    created_at timestamptz NOT NULL DEFAULT now(),
    body       jsonb       NOT NULL,
    CONSTRAINT content_pkey PRIMARY KEY (id)
)
"""

# A message moves from partition to partition, and its row is written again each time. A large payload does not move
# with it: it is written once, here, and deleted with the message (docs/decisions/0024). MAIN keeps it on the page of
# its row, where TOAST would cut it into pieces of 2 kB with an index entry each.
LARGE_PAYLOAD = """
CREATE TABLE pgoutbox.large_payload (
    message_id bigint NOT NULL,
    body       jsonb  NOT NULL,
    CONSTRAINT large_payload_pkey PRIMARY KEY (message_id)
)
"""
LARGE_PAYLOAD_IN_PLACE = "ALTER TABLE pgoutbox.large_payload ALTER COLUMN body SET STORAGE MAIN"

# The stored size in bytes. Below this limit, a second row costs an enqueue more than the copies cost a finish.
IS_LARGE = """
CREATE FUNCTION pgoutbox.is_large(payload jsonb)
RETURNS boolean
LANGUAGE sql
STABLE
PARALLEL SAFE
RETURN pg_catalog.pg_column_size(payload) OPERATOR(pg_catalog.>) 1000
"""

PAYLOAD_OF = """
CREATE FUNCTION pgoutbox.payload_of(m pgoutbox.message)
RETURNS jsonb
LANGUAGE sql
STABLE
RETURN coalesce(
    m.payload,
    (SELECT l.body FROM pgoutbox.large_payload AS l WHERE l.message_id OPERATOR(pg_catalog.=) m.id)
)
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
    reason_code   text,
    breaker_key   text,
    CONSTRAINT attempt_pkey PRIMARY KEY (message_id, attempt_count),
    CONSTRAINT attempt_reason_code_known CHECK (reason_code IN ('circuit_open', 'stalled', 'unavailable')),
    CONSTRAINT attempt_breaker_key_sound CHECK (
        (breaker_key IS NOT NULL) = (reason_code IS NOT NULL AND reason_code IN ('circuit_open', 'stalled'))
    ),
    CONSTRAINT attempt_outcome_known CHECK (
        outcome IN ('retry', 'failed', 'skipped', 'cancelled', 'snoozed', 'released', 'lost')
    )
)
"""

# A transaction that cancels an attempt in flight keeps its row locked until it ends, perhaps for longer than the lease.
# Its worker renews the lease here meanwhile, and the claim of lapsed attempts looks here.
RENEWAL = """
CREATE TABLE pgoutbox.renewal (
    message_id       bigint      NOT NULL,
    lease_expires_at timestamptz NOT NULL,
    attempt_count    integer     NOT NULL,
    worker           text        NOT NULL,
    CONSTRAINT renewal_pkey PRIMARY KEY (message_id)
)
"""

# The end of a lease that was renewed in this table; null for most attempts.
RENEWED_UNTIL = """
CREATE FUNCTION pgoutbox.renewed_until(p_message_id bigint, p_attempt_count integer, p_worker text)
RETURNS timestamptz
LANGUAGE sql
STABLE
RETURN (
    SELECT r.lease_expires_at
    FROM pgoutbox.renewal AS r
    WHERE r.message_id OPERATOR(pg_catalog.=) p_message_id
        AND r.attempt_count OPERATOR(pg_catalog.=) p_attempt_count
        AND r.worker OPERATOR(pg_catalog.=) p_worker
)
"""

QUEUE = """
CREATE TABLE pgoutbox.queue (
    name          text COLLATE "C" NOT NULL,
    paused_at     timestamptz,
    resume_at     timestamptz,
    tokens_at     timestamptz,
    rate_seconds  double precision,
    tokens        double precision,
    rate_count    integer,
    burst         integer,
    max_in_flight integer,
    CONSTRAINT queue_pkey PRIMARY KEY (name),
    CONSTRAINT queue_sound CHECK (
        length(name) <= 63
        AND name ~ '^[a-z][a-z0-9_.-]*$'
        AND (resume_at IS NULL OR paused_at IS NOT NULL)
        AND num_nulls(rate_count, rate_seconds, burst, tokens, tokens_at) IN (0, 5)
        AND rate_count BETWEEN 1 AND 1000000
        AND rate_seconds BETWEEN 0.001 AND 2592000
        AND burst BETWEEN 1 AND 1000000
        AND tokens BETWEEN 0 AND burst
        AND max_in_flight BETWEEN 1 AND 1000000
    )
)
"""

IS_LIMITED = """
CREATE FUNCTION pgoutbox.is_limited(p_queue text)
RETURNS boolean
LANGUAGE plpgsql
STABLE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    RETURN EXISTS (
        SELECT
        FROM pgoutbox.queue AS q
        WHERE q.name = p_queue AND num_nonnulls(q.paused_at, q.rate_count, q.max_in_flight) > 0
    );
END
$function$
"""

# Claims that choose from one backlog at once pass over each other's locked rows: eight workers spend more time on that
# than on their own rows. So at most two claims choose at once: the second one while the first one waits for its commit.
# Correctness does not depend on the turn: after a quarter of a second a claim goes on without it.
TAKE_TURN = """
CREATE FUNCTION pgoutbox.take_turn(p_queue text)
RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET lock_timeout = '250ms'
AS $function$
BEGIN
    IF pg_try_advisory_xact_lock(1885826147, hashtext(p_queue))
        OR pg_try_advisory_xact_lock(1885826148, hashtext(p_queue))
    THEN
        RETURN;
    END IF;
    BEGIN
        PERFORM pg_advisory_xact_lock(1885826147 + pg_backend_pid() % 2, hashtext(p_queue));
    EXCEPTION
        WHEN lock_not_available THEN
            NULL;
    END;
END
$function$
"""

# The number of tokens in the bucket. If the clock was set back, for example by a failover, no tokens are lost.
TOKENS_OF = """
CREATE FUNCTION pgoutbox.tokens_of(limited pgoutbox.queue)
RETURNS double precision
LANGUAGE sql
VOLATILE
RETURN least(
    limited.burst,
    limited.tokens OPERATOR(pg_catalog.+) (
        greatest(
            0,
            extract(epoch FROM pg_catalog.clock_timestamp() OPERATOR(pg_catalog.-) limited.tokens_at)::double precision
        ) OPERATOR(pg_catalog.*) (limited.rate_count OPERATOR(pg_catalog./) limited.rate_seconds)
    )
)
"""

# The only count of messages in flight, with its own snapshot: the caller may have waited for the queue's row. Lapsed
# attempts do not count, or no worker could claim them again.
IN_FLIGHT_OF = """
CREATE FUNCTION pgoutbox.in_flight_of(p_queue text, at_most integer)
RETURNS bigint
LANGUAGE plpgsql
VOLATILE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    RETURN (
        SELECT count(*)
        FROM (
            SELECT
            FROM pgoutbox.message_live AS m
            WHERE m.queue = p_queue AND m.state = 'sending' AND m.lease_expires_at > clock_timestamp()
            LIMIT at_most
        ) AS in_flight
    );
END
$function$
"""

# Claims of a limited queue run one after the other: its row stays locked until the claim has taken its tokens.
PERMITS = """
CREATE FUNCTION pgoutbox.permits(p_queue text, wanted bigint)
RETURNS bigint
LANGUAGE plpgsql
VOLATILE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    limits pgoutbox.queue;
    had_rate boolean;
BEGIN
    SELECT q.* INTO limits FROM pgoutbox.queue AS q WHERE q.name = p_queue;
    IF NOT FOUND THEN
        RETURN wanted;
    END IF;
    IF pgoutbox.next_permit_at(p_queue) IS NOT NULL THEN
        RETURN 0;
    END IF;
    IF num_nonnulls(limits.rate_count, limits.max_in_flight) = 0 THEN
        RETURN wanted;
    END IF;
    had_rate := limits.rate_count IS NOT NULL;
    SELECT q.* INTO limits FROM pgoutbox.queue AS q WHERE q.name = p_queue FOR UPDATE;
    IF limits.paused_at IS NOT NULL AND (limits.resume_at > clock_timestamp()) IS NOT FALSE THEN
        RETURN 0;
    END IF;
    IF limits.rate_count IS NOT NULL AND NOT had_rate THEN
        RETURN 0; -- The claim does not see a rate that is newer than its statement, and would take no tokens.
    END IF;
    RETURN greatest(0, least(
        wanted,
        floor(pgoutbox.tokens_of(limits))::bigint,
        CASE
            WHEN limits.max_in_flight IS NOT NULL
                THEN limits.max_in_flight - pgoutbox.in_flight_of(p_queue, limits.max_in_flight)
        END
    ));
END
$function$
"""

# Workers are not notified when another worker's attempt ends: they check a full queue again after a second.
NEXT_PERMIT_AT = """
CREATE FUNCTION pgoutbox.next_permit_at(p_queue text)
RETURNS timestamptz
LANGUAGE plpgsql
VOLATILE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    limits pgoutbox.queue;
    tokens_now double precision;
BEGIN
    SELECT q.* INTO limits FROM pgoutbox.queue AS q WHERE q.name = p_queue;
    IF NOT FOUND THEN
        RETURN NULL;
    END IF;
    IF limits.paused_at IS NOT NULL AND (limits.resume_at > clock_timestamp()) IS NOT FALSE THEN
        RETURN coalesce(limits.resume_at, 'infinity');
    END IF;
    tokens_now := pgoutbox.tokens_of(limits);
    IF tokens_now < 1 THEN
        RETURN clock_timestamp() + make_interval(secs => (1 - tokens_now) * limits.rate_seconds / limits.rate_count);
    END IF;
    IF limits.max_in_flight IS NOT NULL
        AND pgoutbox.in_flight_of(p_queue, limits.max_in_flight) >= limits.max_in_flight
    THEN
        RETURN clock_timestamp() + interval '1 s';
    END IF;
    RETURN NULL;
END
$function$
"""

# A bulk updates many narrow rows: free space on every page keeps the updates on the page (HOT).
COALESCE = """
CREATE TABLE pgoutbox.coalesce (
    newest_id     bigint NOT NULL,
    waiting_since timestamptz,
    topic         text COLLATE "C" NOT NULL,
    coalesce_key  text COLLATE "C" NOT NULL,
    CONSTRAINT coalesce_pkey PRIMARY KEY (topic, coalesce_key),
    CONSTRAINT coalesce_sound CHECK (coalesce_key <> '')
) WITH (fillfactor = 70)
"""

ORDERING = """
CREATE TABLE pgoutbox.ordering (
    last_id      bigint NOT NULL,
    queue        text COLLATE "C" NOT NULL,
    ordering_key text COLLATE "C" NOT NULL,
    CONSTRAINT ordering_pkey PRIMARY KEY (queue, ordering_key),
    CONSTRAINT ordering_sound CHECK (ordering_key <> '')
) WITH (fillfactor = 70)
"""

DEDUPE = """
CREATE TABLE pgoutbox.dedupe (
    message_id     bigint      NOT NULL,
    created_at     timestamptz NOT NULL DEFAULT now(),
    topic          text COLLATE "C" NOT NULL,
    dedupe_key     text COLLATE "C" NOT NULL,
    payload_digest bytea       NOT NULL,
    CONSTRAINT dedupe_pkey PRIMARY KEY (topic, dedupe_key),
    CONSTRAINT dedupe_sound CHECK (dedupe_key <> '')
)
"""

# A working destination has no row. The fence of a probe is its id: closing and reopening a breaker check it.
BREAKER = """
CREATE TABLE pgoutbox.breaker (
    key              text COLLATE "C" NOT NULL,
    opened_at        timestamptz      NOT NULL DEFAULT now(),
    retry_at         timestamptz      NOT NULL,
    cooldown_seconds double precision NOT NULL,
    probe_id         uuid,
    probe_until      timestamptz,
    worker           text             NOT NULL,
    last_error       text             NOT NULL,
    CONSTRAINT breaker_pkey PRIMARY KEY (key),
    CONSTRAINT breaker_sound CHECK (cooldown_seconds > 0 AND (probe_id IS NULL) = (probe_until IS NULL))
)
"""

# The most specific rule applies: the rule of the topic, or else the rule of all topics. Without a rule nothing is
# deleted.
RETENTION = """
CREATE TABLE pgoutbox.retention (
    keep  interval,
    topic text COLLATE "C" NOT NULL,
    state text COLLATE "C" NOT NULL,
    CONSTRAINT retention_pkey PRIMARY KEY (topic, state),
    CONSTRAINT retention_topic_sound CHECK (topic = '*' OR (length(topic) <= 63 AND topic ~ '^[a-z][a-z0-9_.-]*$')),
    CONSTRAINT retention_state_known CHECK (state IN ('sent', 'failed', 'skipped', 'cancelled', 'dedupe_key')),
    CONSTRAINT retention_keep_sound CHECK (keep >= interval '0' AND keep <= interval '36500 days')
)
"""

# Manual changes. A bulk is one act of several batches, with a row for each batch.
AUDIT = """
CREATE TABLE pgoutbox.audit (
    id            bigint      NOT NULL GENERATED ALWAYS AS IDENTITY,
    acted_at      timestamptz NOT NULL DEFAULT clock_timestamp(),
    act_id        uuid        NOT NULL,
    message_count integer,
    actor         text        NOT NULL,
    db_role       text        NOT NULL DEFAULT session_user,
    origin        text,
    action        text        NOT NULL,
    queue         text,
    message_ids   bigint[],
    details       jsonb,
    CONSTRAINT audit_pkey PRIMARY KEY (id),
    CONSTRAINT audit_sound CHECK (
        action IN ('redrive', 'resend', 'cancel', 'prune', 'pause', 'resume', 'limit', 'retention', 'breaker')
        AND length(actor) BETWEEN 1 AND 200
        AND (origin IS NULL OR length(origin) BETWEEN 1 AND 200)
        AND message_count > 0
        AND (message_ids IS NULL OR cardinality(message_ids) = message_count)
    )
)
"""
AUDIT_MESSAGES = "CREATE INDEX audit_message_ids ON pgoutbox.audit USING gin (message_ids)"

# The database records each act itself, with the role of the session, so that every act has a row. Command line and
# dashboard pass the person and the parameters of the act in settings of the transaction.
RECORD_ACT = """
CREATE FUNCTION pgoutbox.record_act(
    action text,
    message_ids bigint[] DEFAULT NULL,
    message_count integer DEFAULT NULL,
    queue text DEFAULT NULL,
    details jsonb DEFAULT NULL
)
RETURNS void
LANGUAGE sql
SET search_path = pg_catalog, pg_temp
AS $function$
INSERT INTO pgoutbox.audit (act_id, actor, origin, action, queue, message_count, message_ids, details)
SELECT
    coalesce(nullif(current_setting('pgoutbox.act_id', true), '')::uuid, gen_random_uuid()),
    coalesce(nullif(current_setting('pgoutbox.act_actor', true), ''), session_user),
    nullif(current_setting('pgoutbox.act_origin', true), ''),
    record_act.action,
    record_act.queue,
    coalesce(cardinality(record_act.message_ids), record_act.message_count),
    record_act.message_ids,
    coalesce(nullif(current_setting('pgoutbox.act_details', true), '')::jsonb, record_act.details)
WHERE coalesce(cardinality(record_act.message_ids), record_act.message_count, 1) > 0
$function$
"""

# For changes that applications and workers also make. A login that can also enqueue or deliver counts as an application
# or a worker, and so does the owner: their changes are acts only if the transaction has an act id.
IS_ACT = """
CREATE FUNCTION pgoutbox.is_act()
RETURNS boolean
LANGUAGE sql
STABLE
SET search_path = pg_catalog, pg_temp
AS $function$
SELECT (current_setting('pgoutbox.act_id', true) <> '') IS TRUE
    OR (
        pg_has_role(session_user, to_regrole('pgoutbox_operator'), 'USAGE') IS TRUE
        AND pg_has_role(session_user, to_regrole('pgoutbox_producer'), 'USAGE') IS NOT TRUE
        AND pg_has_role(session_user, to_regrole('pgoutbox_worker'), 'USAGE') IS NOT TRUE
    )
$function$
"""

RECORD_QUEUE_ACT = """
CREATE FUNCTION pgoutbox.record_queue_act()
RETURNS trigger
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    IF (NEW.paused_at, NEW.resume_at) IS DISTINCT FROM (OLD.paused_at, OLD.resume_at) THEN
        PERFORM pgoutbox.record_act(
            CASE WHEN NEW.paused_at IS NULL THEN 'resume' ELSE 'pause' END,
            queue => NEW.name,
            details => CASE WHEN NEW.resume_at IS NOT NULL THEN jsonb_build_object('resume_at', NEW.resume_at) END
        );
    END IF;
    IF (NEW.rate_count, NEW.rate_seconds, NEW.burst, NEW.max_in_flight)
        IS DISTINCT FROM (OLD.rate_count, OLD.rate_seconds, OLD.burst, OLD.max_in_flight)
    THEN
        PERFORM pgoutbox.record_act(
            'limit',
            queue => NEW.name,
            details => jsonb_build_object(
                'rate', coalesce(NEW.rate_count || '/' || NEW.rate_seconds || 's', 'none'),
                'burst', NEW.burst,
                'max_in_flight', NEW.max_in_flight
            )
        );
    END IF;
    RETURN NULL;
END
$function$
"""

# Claims write only tokens, which does not fire this trigger.
QUEUE_ACTS = """
CREATE TRIGGER queue_acts
AFTER INSERT OR UPDATE OF paused_at, resume_at, rate_count, rate_seconds, burst, max_in_flight ON pgoutbox.queue
FOR EACH ROW
EXECUTE FUNCTION pgoutbox.record_queue_act()
"""

RECORD_RETENTION_ACT = """
CREATE FUNCTION pgoutbox.record_retention_act()
RETURNS trigger
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    rule constant pgoutbox.retention := CASE WHEN TG_OP = 'DELETE' THEN OLD ELSE NEW END;
BEGIN
    PERFORM pgoutbox.record_act(
        'retention',
        details => jsonb_build_object(
            'topic', rule.topic,
            'state', rule.state,
            'keep_seconds', CASE
                WHEN TG_OP = 'DELETE' THEN '"no rule"'::jsonb
                WHEN rule.keep IS NULL THEN '"for ever"'::jsonb
                ELSE to_jsonb(extract(epoch FROM rule.keep)::float8)
            END
        )
    );
    RETURN NULL;
END
$function$
"""

RETENTION_ACTS = """
CREATE TRIGGER retention_acts
AFTER INSERT OR UPDATE OR DELETE ON pgoutbox.retention
FOR EACH ROW
EXECUTE FUNCTION pgoutbox.record_retention_act()
"""

# Workers also close breakers, when a probe succeeds.
RECORD_BREAKER_ACT = """
CREATE FUNCTION pgoutbox.record_breaker_act()
RETURNS trigger
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    IF pgoutbox.is_act() THEN
        PERFORM pgoutbox.record_act('breaker', details => jsonb_build_object('key', OLD.key));
    END IF;
    RETURN NULL;
END
$function$
"""

BREAKER_ACTS = """
CREATE TRIGGER breaker_acts
AFTER DELETE ON pgoutbox.breaker
FOR EACH ROW
EXECUTE FUNCTION pgoutbox.record_breaker_act()
"""

# One expression without a subselect, so that PostgreSQL inlines it: the single and the bulk path check by the same
# rules at the cost of an IF. A bounded repetition in a regular expression costs ten times as much as an unbounded one.
# Only large payloads are converted to text: that costs a tenth of an enqueue.
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
    max_attempts integer,
    ordering_key text,
    on_failed text,
    max_delay interval,
    coalesce_rule text
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
    WHEN pg_column_size(payload) > 65536 AND octet_length(payload::text) > 16777216
        THEN 'payload: must not have more than 16777216 bytes'
    WHEN queue IS NULL THEN 'queue: must not be null'
    WHEN length(queue) > 63 OR queue !~ '^[a-z][a-z0-9_.-]*$'
        THEN 'queue: must be 1 to 63 of a-z, 0-9, underscore, dot and hyphen, the first a letter'
    WHEN max_attempts IS NULL THEN 'max_attempts: must not be null'
    WHEN max_attempts NOT BETWEEN 1 AND 10000 THEN 'max_attempts: must be from 1 to 10000'
    WHEN coalesce_key = '' THEN 'coalesce_key: must not be empty; pass NULL for no key'
    WHEN dedupe_key = '' THEN 'dedupe_key: must not be empty; pass NULL for no key'
    WHEN ordering_key = '' THEN 'ordering_key: must not be empty; pass NULL for no key'
    WHEN octet_length(coalesce_key) > 512 THEN 'coalesce_key: must not be longer than 512 bytes'
    WHEN octet_length(dedupe_key) > 512 THEN 'dedupe_key: must not be longer than 512 bytes'
    WHEN octet_length(ordering_key) > 512 THEN 'ordering_key: must not be longer than 512 bytes'
    WHEN ordering_key IS NOT NULL AND coalesce_key IS NOT NULL
        THEN 'ordering_key: must not be given together with coalesce_key'
    WHEN on_failed NOT IN ('continue', 'halt') THEN 'on_failed: must be continue or halt'
    WHEN on_failed IS NOT NULL AND ordering_key IS NULL THEN 'on_failed: must not be given without ordering_key'
    WHEN max_delay IS NOT NULL AND coalesce_key IS NULL THEN 'max_delay: must not be given without coalesce_key'
    WHEN max_delay NOT BETWEEN interval '0' AND interval '3650 days'
        THEN 'max_delay: must not be negative nor longer than 3650 days'
    WHEN coalesce_rule NOT IN ('newest', 'pending') THEN 'coalesce_rule: must be newest or pending'
    WHEN coalesce_rule IS NOT NULL AND coalesce_key IS NULL
        THEN 'coalesce_rule: must not be given without coalesce_key'
    WHEN max_delay IS NOT NULL AND coalesce_rule = 'pending'
        THEN 'max_delay: must not be given together with coalesce_rule pending'
    WHEN octet_length(destination) > 2048 OR destination !~ '^[A-Za-z][A-Za-z0-9+.-]*:[^[:cntrl:]]+$'
        THEN 'destination: must be a URI such as mailto:a@example.org, without control characters, of at most 2048 '
            'bytes'
    WHEN strpos(destination, ',') > 0 AND lower(left(destination, 7)) = 'mailto:'
        THEN 'destination: must name one recipient, without a comma; enqueue one message for each'
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
    WHEN pg_column_size(headers) > 1024 AND octet_length(headers::text) > 65536
        THEN 'headers: must not have more than 65536 bytes'
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
# visible; the worker gets it only after that, and looks once more before it sleeps. 1885826146 is "pgob" in ASCII. When
# the server's notification queue is full, the COMMIT of every notifying transaction fails: an enqueue stops ringing
# before that, and workers already poll by then.
RING = """
CREATE FUNCTION pgoutbox.ring(queue text)
RETURNS void
LANGUAGE plpgsql
AS $function$
BEGIN
    IF NOT pg_catalog.pg_try_advisory_xact_lock_shared(1885826146, pg_catalog.hashtext(queue))
        AND pg_catalog.pg_notification_queue_usage() OPERATOR(pg_catalog.<) 0.9
    THEN
        PERFORM pg_catalog.pg_notify('pgoutbox', queue);
    END IF;
END
$function$
"""

# The message that supersedes another by the rule `pending`: a newer one that falls due no later, in the snapshot of the
# calling statement (hence STABLE). It is the one that fell due last, because many messages may not be due yet. An
# expired message supersedes nothing. The planner must read the index in this order, and stop at the first row. The id
# plus 0 keeps it from using the primary key. With IS NOT FALSE it would expect no row.
NEWER_PENDING = """
CREATE FUNCTION pgoutbox.newer_pending(
    p_topic text, p_coalesce_key text, p_queue text, p_id bigint, due_by timestamptz DEFAULT now()
)
RETURNS bigint
LANGUAGE plpgsql
STABLE
AS $function$
BEGIN
    RETURN (
        SELECT m.id
        FROM pgoutbox.message_live AS m
        WHERE m.coalesces_pending
            AND m.state OPERATOR(pg_catalog.=) 'pending'
            AND m.topic OPERATOR(pg_catalog.=) p_topic
            AND m.coalesce_key OPERATOR(pg_catalog.=) p_coalesce_key
            AND m.queue OPERATOR(pg_catalog.=) p_queue
            AND m.available_at OPERATOR(pg_catalog.<=) due_by
            AND m.id OPERATOR(pg_catalog.+) 0 OPERATOR(pg_catalog.>) p_id
            AND (m.expires_at IS NULL OR m.expires_at OPERATOR(pg_catalog.>) pg_catalog.now())
        ORDER BY m.available_at DESC, m.id DESC
        LIMIT 1
    );
END
$function$
"""

# The same for a claim. The lock keeps the newer message pending until the claim commits, so an attempt for the key
# begins after this claim (docs/decisions/0021). Zero if another session has locked or changed the newer message.
LOCK_NEWER_PENDING = """
CREATE FUNCTION pgoutbox.lock_newer_pending(p_topic text, p_coalesce_key text, p_queue text, p_id bigint)
RETURNS bigint
LANGUAGE plpgsql
VOLATILE
AS $function$
DECLARE
    newer_id constant bigint := pgoutbox.newer_pending(p_topic, p_coalesce_key, p_queue, p_id);
BEGIN
    IF newer_id IS NULL THEN
        RETURN NULL;
    END IF;
    PERFORM
    FROM pgoutbox.message_live AS m
    WHERE m.id OPERATOR(pg_catalog.=) newer_id
        AND m.state OPERATOR(pg_catalog.=) 'pending'
        AND m.available_at OPERATOR(pg_catalog.<=) pg_catalog.now()
    FOR SHARE SKIP LOCKED;
    RETURN CASE WHEN FOUND THEN newer_id ELSE 0 END;
END
$function$
"""

# A message of the rule `pending` waits for this one: if one claim began two messages of a key, the unique index would
# refuse it.
HAS_STRICT_DUE = """
CREATE FUNCTION pgoutbox.has_strict_due(p_topic text, p_coalesce_key text, p_queue text)
RETURNS boolean
LANGUAGE plpgsql
STABLE
AS $function$
BEGIN
    RETURN EXISTS (
        SELECT
        FROM pgoutbox.coalesce AS head
        JOIN pgoutbox.message_live AS m ON m.id OPERATOR(pg_catalog.=) head.newest_id
        WHERE head.topic OPERATOR(pg_catalog.=) p_topic
            AND head.coalesce_key OPERATOR(pg_catalog.=) p_coalesce_key
            AND m.queue OPERATOR(pg_catalog.=) p_queue
            AND m.state OPERATOR(pg_catalog.=) 'pending'
            AND m.available_at OPERATOR(pg_catalog.<=) pg_catalog.now()
    );
END
$function$
"""

# The short check, for most messages and for those that coalesce without locks. argument_error checks all others.
# PostgreSQL inlines the body only if the function has the volatility of pg_column_size: STABLE.
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
    max_attempts integer,
    ordering_key text,
    on_failed text,
    max_delay interval,
    coalesce_rule text
)
RETURNS boolean
LANGUAGE sql
STABLE
PARALLEL SAFE
RETURN pg_catalog.num_nonnulls(
        destination, dedupe_key, available_at, expires_at, headers, ordering_key, on_failed, max_delay
    ) OPERATOR(pg_catalog.=) 0
    AND (
        pg_catalog.num_nonnulls(coalesce_key, coalesce_rule) OPERATOR(pg_catalog.=) 0
        OR coalesce_rule OPERATOR(pg_catalog.=) 'pending'
        AND pg_catalog.octet_length(coalesce_key) OPERATOR(pg_catalog.>=) 1
        AND pg_catalog.octet_length(coalesce_key) OPERATOR(pg_catalog.<=) 512
    )
    AND topic OPERATOR(pg_catalog.~) '^[a-z][a-z0-9_.-]*$'
    AND queue OPERATOR(pg_catalog.~) '^[a-z][a-z0-9_.-]*$'
    AND pg_catalog.length(topic) OPERATOR(pg_catalog.<=) 63
    AND pg_catalog.length(queue) OPERATOR(pg_catalog.<=) 63
    AND NOT pgoutbox.is_large(payload)
    AND max_attempts OPERATOR(pg_catalog.>=) 1
    AND max_attempts OPERATOR(pg_catalog.<=) 10000
"""

# Write a checked message that has an id, and ring. It pins no settings: only enqueue_checked may call it, and that
# function has pinned them.
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
    p_ordering_key text,
    p_on_failed text,
    p_coalesces_pending boolean,
    p_notify boolean
)
RETURNS bigint
LANGUAGE plpgsql
AS $function$
BEGIN
    IF pgoutbox.is_large(p_payload) THEN
        INSERT INTO pgoutbox.large_payload (message_id, body) VALUES (p_id, p_payload);
        p_payload := NULL;
    END IF;
    INSERT INTO pgoutbox.message_live (
        id, topic, payload, queue, destination, coalesce_key, dedupe_key, ordering_key, on_failed,
        available_at, expires_at, headers, max_attempts, attempt_budget, coalesces_pending
    ) VALUES (
        p_id, p_topic, p_payload, p_queue, p_destination, p_coalesce_key, p_dedupe_key, p_ordering_key, p_on_failed,
        greatest(p_available_at, pg_catalog.now()), p_expires_at, p_headers, p_max_attempts, p_max_attempts,
        p_coalesces_pending
    );
    IF p_notify IS NOT FALSE
        AND NOT pg_catalog.pg_try_advisory_xact_lock_shared(1885826146, pg_catalog.hashtext(p_queue))
        AND pg_catalog.pg_notification_queue_usage() OPERATOR(pg_catalog.<) 0.9
    THEN
        PERFORM pg_catalog.pg_notify('pgoutbox', p_queue);
    END IF;
    RETURN p_id;
END
$function$
"""

# Encrypting the same payload gives a different text each time. So an encrypted payload contains digests, one for each
# key of its producer. Any of them identifies a repeated payload, so that keys can be rotated.
PAYLOAD_DIGESTS = """
CREATE FUNCTION pgoutbox.payload_digests(p_payload jsonb)
RETURNS bytea[]
LANGUAGE plpgsql
STABLE
AS $function$
DECLARE
    digests bytea[];
BEGIN
    IF p_payload -> 'pgoutbox.encrypted' IS NOT NULL THEN
        SELECT array_agg(sha256(convert_to('digest ' || (d.digest #>> '{}'), 'UTF8')) ORDER BY d.ordinality)
        INTO digests
        FROM jsonb_path_query(
            p_payload, 'strict $."pgoutbox.encrypted"."digests"[*] ? (@.type() == "string")', '{}', true
        ) WITH ORDINALITY AS d(digest, ordinality);
    END IF;
    RETURN coalesce(digests, ARRAY[sha256(convert_to(p_payload::text, 'UTF8'))]);
END
$function$
"""

# A superseded message keeps its key: the newer message replaces it. The final state of a deleted message is unknown, so
# it keeps its key too. Volatile, so that each look sees all earlier commits.
HAS_FREED_KEY = """
CREATE FUNCTION pgoutbox.has_freed_key(p_id bigint)
RETURNS boolean
LANGUAGE plpgsql
VOLATILE
AS $function$
BEGIN
    -- Separate, because most messages are found here: the query below locks every partition against its retirement.
    IF EXISTS (SELECT FROM pgoutbox.message_live AS m WHERE m.id = p_id) THEN
        RETURN false;
    END IF;
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        -- The snapshot may be older than a redrive of the message. Then the lock is refused with 40001.
        PERFORM FROM pgoutbox.message AS m WHERE m.id = p_id AND m.state IN ('cancelled', 'skipped')
        FOR KEY SHARE SKIP LOCKED;
    END IF;
    RETURN EXISTS (
        SELECT
        FROM pgoutbox.message AS m
        WHERE m.id = p_id AND m.state IN ('cancelled', 'skipped') AND m.superseded_by IS NULL
    );
END
$function$
"""

# The next id of a key, greater than its newest id. A sequence that was set back, was not restored with the data, or
# hands out ids from sessions' caches would reverse newest-wins and the order of a key.
NEXT_ID = """
CREATE FUNCTION pgoutbox.next_id(newest_id bigint)
RETURNS bigint
LANGUAGE plpgsql
AS $function$
DECLARE
    new_id constant bigint := nextval('pgoutbox.message_id_seq');
BEGIN
    IF new_id <= newest_id THEN
        RAISE EXCEPTION USING
            ERRCODE = 'object_not_in_prerequisite_state',
            SCHEMA = 'pgoutbox',
            MESSAGE = 'pgoutbox.enqueue: sequence pgoutbox.message_id_seq is behind the messages: it gave ' || new_id
                || ', and the newest message of this key is ' || newest_id || '; run: ALTER SEQUENCE '
                'pgoutbox.message_id_seq CACHE 1; SELECT setval(''pgoutbox.message_id_seq'', greatest('
                '(SELECT max(id) FROM pgoutbox.message), (SELECT max(newest_id) FROM pgoutbox.coalesce), '
                '(SELECT max(last_id) FROM pgoutbox.ordering))); and reconnect';
    END IF;
    RETURN new_id;
END
$function$
"""

# Enqueue a message that may be invalid or has a key. It returns the result of enqueue_receipt, its only caller beside
# enqueue_keyed, and runs with the owner's privileges.
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
    p_ordering_key text,
    p_on_failed text,
    p_max_delay interval,
    p_coalesce_rule text,
    p_notify boolean
)
RETURNS bigint
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    -- The transaction has its id before its messages have theirs: CLAIM_NEW of the worker relies on it.
    own_xid constant xid8 := pg_catalog.pg_current_xact_id();
    -- True or null: a message of this rule has no head, and its enqueue takes no lock.
    coalesces_pending constant boolean := nullif(p_coalesce_rule = 'pending', false);
    new_id bigint;
    since timestamptz;
    problem text;
    digests bytea[];
    known_id bigint;
    known_digest bytea;
BEGIN
    problem := pgoutbox.argument_error(
        p_topic, p_payload, p_queue, p_destination, p_coalesce_key, p_dedupe_key,
        p_available_at, p_expires_at, p_headers, p_max_attempts, p_ordering_key, p_on_failed, p_max_delay,
        p_coalesce_rule
    );
    IF problem IS NOT NULL THEN
        PERFORM pgoutbox.raise_argument_error(problem);
    END IF;
    new_id := nextval('pgoutbox.message_id_seq');

    IF p_dedupe_key IS NOT NULL THEN
        digests := pgoutbox.payload_digests(p_payload);
        LOOP
            -- This waits for a transaction that is inserting the same key, and inserts the row if that one rolls back.
            INSERT INTO pgoutbox.dedupe (message_id, topic, dedupe_key, payload_digest)
            VALUES (new_id, p_topic, p_dedupe_key, digests[1])
            ON CONFLICT ON CONSTRAINT dedupe_pkey DO NOTHING;
            EXIT WHEN FOUND;
            SELECT d.message_id, d.payload_digest
            INTO known_id, known_digest
            FROM pgoutbox.dedupe AS d
            WHERE d.topic = p_topic AND d.dedupe_key = p_dedupe_key;
            CONTINUE WHEN NOT FOUND;
            IF pgoutbox.has_freed_key(known_id) THEN
                -- Concurrent callers get this lock one after the other, and the first one changes message_id. A redrive
                -- of the cancelled message holds it until its commit, so look at the message again.
                PERFORM FROM pgoutbox.dedupe AS d
                WHERE d.topic = p_topic AND d.dedupe_key = p_dedupe_key AND d.message_id = known_id
                FOR UPDATE;
                CONTINUE WHEN NOT FOUND;
                CONTINUE WHEN NOT pgoutbox.has_freed_key(known_id);
                UPDATE pgoutbox.dedupe AS d
                SET message_id = new_id, payload_digest = digests[1], created_at = now()
                WHERE d.topic = p_topic AND d.dedupe_key = p_dedupe_key;
                EXIT;
            ELSIF known_digest = ANY (digests) THEN
                RETURN -known_id;
            ELSE
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

    IF p_ordering_key IS NOT NULL THEN
        -- As below: the order of ids is the order of commits.
        INSERT INTO pgoutbox.ordering AS tail (last_id, queue, ordering_key)
        VALUES (new_id, p_queue, p_ordering_key)
        ON CONFLICT ON CONSTRAINT ordering_pkey DO UPDATE SET last_id = pgoutbox.next_id(tail.last_id)
        RETURNING tail.last_id INTO new_id;
    END IF;

    IF p_max_delay IS NOT NULL THEN
        -- Each newer message restarts the delay, up to max_delay after the first waiting one. The row is inserted
        -- first, so that of two concurrent first messages of a key the second one has a row to wait for.
        INSERT INTO pgoutbox.coalesce (newest_id, topic, coalesce_key)
        VALUES (new_id, p_topic, p_coalesce_key)
        ON CONFLICT ON CONSTRAINT coalesce_pkey DO NOTHING;
        SELECT head.newest_id, head.waiting_since
        INTO known_id, since
        FROM pgoutbox.coalesce AS head
        WHERE head.topic = p_topic AND head.coalesce_key = p_coalesce_key
        FOR UPDATE;
        IF NOT EXISTS (
            SELECT
            FROM pgoutbox.message AS m
            WHERE m.id = known_id AND m.state = 'pending' AND m.attempt_count = 0
        ) THEN
            since := NULL;
        END IF;
        since := coalesce(since, now());
        p_available_at := least(coalesce(p_available_at, now()), since + p_max_delay);
    END IF;

    IF p_coalesce_key IS NOT NULL AND coalesces_pending IS NULL THEN
        -- The id is drawn while the head row is locked, so among the messages of one key the order of ids is the order
        -- of commits. A message is superseded if the head names a greater id.
        INSERT INTO pgoutbox.coalesce AS head (newest_id, waiting_since, topic, coalesce_key)
        VALUES (new_id, since, p_topic, p_coalesce_key)
        ON CONFLICT ON CONSTRAINT coalesce_pkey DO UPDATE
        SET newest_id = pgoutbox.next_id(head.newest_id),
            waiting_since = coalesce(excluded.waiting_since, head.waiting_since)
        RETURNING head.newest_id INTO new_id;
    END IF;

    IF p_dedupe_key IS NOT NULL AND num_nonnulls(p_coalesce_key, p_ordering_key) > 0 THEN
        UPDATE pgoutbox.dedupe AS d
        SET message_id = new_id
        WHERE d.topic = p_topic AND d.dedupe_key = p_dedupe_key;
    END IF;

    RETURN pgoutbox.write_message(
        new_id, p_topic, p_payload, p_queue, p_destination, p_coalesce_key, p_dedupe_key,
        p_available_at, p_expires_at, p_headers, p_max_attempts, p_ordering_key, nullif(p_on_failed, 'continue'),
        coalesces_pending, p_notify
    );
END
$function$
"""

# Its callers need no privilege on any table: it runs with the owner's privileges. So it must check the arguments
# itself. It is the only function without a search_path, which would cost a tenth of an enqueue: it has no operator, and
# every name is qualified (docs/decisions/0016). The plain case is here, because another function would cost as much
# again, and so would a row as the result. The id is negative if the message already existed.
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
    ordering_key text,
    on_failed text,
    max_delay interval,
    coalesce_rule text,
    notify boolean
)
RETURNS bigint
LANGUAGE plpgsql
SECURITY DEFINER
AS $function$
DECLARE
    -- The transaction has its id before its messages have theirs: CLAIM_NEW of the worker relies on it.
    own_xid constant xid8 := pg_catalog.pg_current_xact_id();
    new_id bigint;
BEGIN
    IF pgoutbox.is_plain(
        topic, payload, queue, destination, coalesce_key, dedupe_key, available_at, expires_at, headers, max_attempts,
        ordering_key, on_failed, max_delay, coalesce_rule
    ) THEN
        new_id := pg_catalog.nextval('pgoutbox.message_id_seq');
        INSERT INTO pgoutbox.message_live (
            id, topic, payload, queue, max_attempts, attempt_budget, coalesce_key, coalesces_pending
        ) VALUES (
            new_id, topic, payload, queue, max_attempts, max_attempts, coalesce_key,
            coalesce_rule OPERATOR(pg_catalog.=) 'pending'
        );
        IF notify IS NOT FALSE
            AND NOT pg_catalog.pg_try_advisory_xact_lock_shared(1885826146, pg_catalog.hashtext(queue))
            AND pg_catalog.pg_notification_queue_usage() OPERATOR(pg_catalog.<) 0.9
        THEN
            PERFORM pg_catalog.pg_notify('pgoutbox', queue);
        END IF;
        RETURN new_id;
    END IF;
    RETURN pgoutbox.enqueue_checked(
        topic, payload, queue, destination, coalesce_key, dedupe_key,
        available_at, expires_at, headers, max_attempts, ordering_key, on_failed, max_delay, coalesce_rule, notify
    );
END
$function$
"""

# PostgreSQL inlines the body, so the function costs nothing.
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
    notify boolean DEFAULT true,
    ordering_key text DEFAULT NULL,
    on_failed text DEFAULT NULL,
    max_delay interval DEFAULT NULL,
    coalesce_rule text DEFAULT NULL
)
RETURNS bigint
LANGUAGE sql
RETURN pg_catalog.abs(pgoutbox.enqueue_receipt(
    topic, payload, queue, destination, coalesce_key, dedupe_key,
    available_at, expires_at, headers, max_attempts, ordering_key, on_failed, max_delay, coalesce_rule, notify
))
"""

# The items of a bulk as rows, with defaults. PostgreSQL inlines the query.
BULK_ITEMS = """
CREATE FUNCTION pgoutbox.bulk_items(
    topics text[],
    payloads jsonb[],
    queues text[],
    destinations text[],
    coalesce_keys text[],
    dedupe_keys text[],
    available_ats timestamptz[],
    delays double precision[],
    expires_ats timestamptz[],
    headers jsonb[],
    max_attempts integer[],
    ordering_keys text[],
    on_failed text[],
    max_delays double precision[],
    coalesce_rules text[]
)
RETURNS TABLE (
    item_index integer, topic text, payload jsonb, queue text, destination text, coalesce_key text, dedupe_key text,
    available_at timestamptz, expires_at timestamptz, headers jsonb, max_attempts integer, ordering_key text,
    on_failed text, max_delay interval, coalesce_rule text
)
LANGUAGE sql
STABLE
BEGIN ATOMIC
    SELECT
        a.ordinality::integer OPERATOR(pg_catalog.-) 1, a.topic, a.payload, coalesce(a.queue, 'default'),
        a.destination, a.coalesce_key, a.dedupe_key,
        greatest(
            a.available_at, pg_catalog.now() OPERATOR(pg_catalog.+) pg_catalog.make_interval(secs => a.delay)
        ),
        a.expires_at, a.headers, coalesce(a.max_attempts, 11), a.ordering_key, a.on_failed,
        pg_catalog.make_interval(secs => a.max_delay), a.coalesce_rule
    FROM unnest(
        topics, payloads, queues, destinations, coalesce_keys, dedupe_keys, available_ats, delays, expires_ats,
        headers, max_attempts, ordering_keys, on_failed, max_delays, coalesce_rules
    ) WITH ORDINALITY AS a(
        topic, payload, queue, destination, coalesce_key, dedupe_key, available_at, delay, expires_at,
        headers, max_attempts, ordering_key, on_failed, max_delay, coalesce_rule, ordinality
    );
END
"""

# Items whose only key is a coalesce key of the rule `newest`. The ids are drawn first. If another transaction has
# written a greater id into the head meanwhile, a new id is drawn while the head is locked. So the order of the newest
# ids of a key is the order of commits. Earlier items of the same key are superseded at once. The planner does not know
# how long the arrays are, and would join them row by row.
ENQUEUE_COALESCED = """
CREATE FUNCTION pgoutbox.enqueue_coalesced(
    topics text[],
    payloads jsonb[],
    queues text[],
    destinations text[],
    coalesce_keys text[],
    available_ats timestamptz[],
    delays double precision[],
    expires_ats timestamptz[],
    headers jsonb[],
    max_attempts integer[],
    coalesce_rules text[]
)
RETURNS TABLE (item_index integer, id bigint)
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_nestloop = off
AS $function$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    WITH item AS MATERIALIZED (
        SELECT s.*, nextval('pgoutbox.message_id_seq') AS drawn_id
        FROM (
            SELECT a.*, lead(a.item_index) OVER (
                PARTITION BY a.topic COLLATE "C", a.coalesce_key COLLATE "C" ORDER BY a.item_index
            ) IS NULL AS is_newest
            FROM pgoutbox.bulk_items(
                topics, payloads, queues, destinations, coalesce_keys, NULL, available_ats, delays, expires_ats,
                headers, max_attempts, NULL, NULL, NULL, coalesce_rules
            ) AS a
            WHERE a.coalesce_key IS NOT NULL AND a.coalesce_rule IS DISTINCT FROM 'pending'
            ORDER BY a.topic COLLATE "C", a.coalesce_key COLLATE "C", a.item_index
        ) AS s
    ), head AS (
        INSERT INTO pgoutbox.coalesce AS head (newest_id, topic, coalesce_key)
        SELECT i.drawn_id, i.topic, i.coalesce_key
        FROM item AS i
        WHERE i.is_newest
        ON CONFLICT ON CONSTRAINT coalesce_pkey DO UPDATE
        SET newest_id = CASE
            WHEN excluded.newest_id > head.newest_id THEN excluded.newest_id
            ELSE pgoutbox.next_id(head.newest_id)
        END
        RETURNING head.newest_id, head.topic, head.coalesce_key
    ), numbered AS MATERIALIZED (
        SELECT i.*, CASE WHEN i.is_newest THEN h.newest_id ELSE i.drawn_id END AS id
        FROM item AS i
        JOIN head AS h ON h.topic = i.topic AND h.coalesce_key = i.coalesce_key
    ), large AS (
        INSERT INTO pgoutbox.large_payload (message_id, body)
        SELECT n.id, n.payload
        FROM numbered AS n
        WHERE pgoutbox.is_large(n.payload)
    ), inserted AS (
        INSERT INTO pgoutbox.message_live (
            id, topic, payload, queue, destination, coalesce_key, available_at, expires_at, headers, max_attempts,
            attempt_budget
        )
        SELECT
            n.id, n.topic, CASE WHEN NOT pgoutbox.is_large(n.payload) THEN n.payload END, n.queue, n.destination,
            n.coalesce_key, greatest(n.available_at, now()),
            n.expires_at, n.headers, n.max_attempts, n.max_attempts
        FROM numbered AS n
    )
    SELECT n.item_index, n.id
    FROM numbered AS n;
END
$function$
"""

# Items whose only key is a dedupe key that no message has yet. enqueue_checked handles the others.
ENQUEUE_DEDUPED = """
CREATE FUNCTION pgoutbox.enqueue_deduped(
    topics text[],
    payloads jsonb[],
    queues text[],
    destinations text[],
    dedupe_keys text[],
    available_ats timestamptz[],
    delays double precision[],
    expires_ats timestamptz[],
    headers jsonb[],
    max_attempts integer[]
)
RETURNS TABLE (item_index integer, id bigint)
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_nestloop = off
AS $function$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    WITH item AS MATERIALIZED (
        SELECT s.*, nextval('pgoutbox.message_id_seq') AS id
        FROM (
            SELECT a.*
            FROM pgoutbox.bulk_items(
                topics, payloads, queues, destinations, NULL, dedupe_keys, available_ats, delays, expires_ats, headers,
                max_attempts, NULL, NULL, NULL, NULL
            ) AS a
            WHERE a.dedupe_key IS NOT NULL
            ORDER BY a.topic COLLATE "C", a.dedupe_key COLLATE "C", a.item_index
        ) AS s
    ), taken AS (
        INSERT INTO pgoutbox.dedupe AS d (message_id, topic, dedupe_key, payload_digest)
        SELECT i.id, i.topic, i.dedupe_key, (pgoutbox.payload_digests(i.payload))[1]
        FROM item AS i
        ON CONFLICT ON CONSTRAINT dedupe_pkey DO NOTHING
        RETURNING d.message_id
    ), large AS (
        INSERT INTO pgoutbox.large_payload (message_id, body)
        SELECT i.id, i.payload
        FROM item AS i
        JOIN taken AS t ON t.message_id = i.id
        WHERE pgoutbox.is_large(i.payload)
    ), inserted AS (
        INSERT INTO pgoutbox.message_live (
            id, topic, payload, queue, destination, dedupe_key, available_at, expires_at, headers, max_attempts,
            attempt_budget
        )
        SELECT
            i.id, i.topic, CASE WHEN NOT pgoutbox.is_large(i.payload) THEN i.payload END, i.queue, i.destination,
            i.dedupe_key, greatest(i.available_at, now()),
            i.expires_at, i.headers, i.max_attempts, i.max_attempts
        FROM item AS i
        JOIN taken AS t ON t.message_id = i.id
    )
    SELECT i.item_index, i.id
    FROM item AS i
    JOIN taken AS t ON t.message_id = i.id;
END
$function$
"""

# Whether one of the keys is free again, because its message was cancelled or skipped.
HAS_FREED_KEYS = """
CREATE FUNCTION pgoutbox.has_freed_keys(topics text[], dedupe_keys text[])
RETURNS boolean
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    RETURN EXISTS (
        SELECT
        FROM unnest(topics, dedupe_keys) AS k(topic, dedupe_key)
        JOIN pgoutbox.dedupe AS d ON d.topic = k.topic AND d.dedupe_key = k.dedupe_key
        WHERE pgoutbox.has_freed_key(d.message_id)
    );
END
$function$
"""

# Items with keys that enqueue locks. Every transaction locks ordering keys first, then coalesce keys, then dedupe keys,
# and keys of one kind in their order. So two bulks do not wait for each other in a circle. (Messages with two keys that
# combine them differently can; then PostgreSQL ends one of the two.) Messages of one coalesce or ordering key keep the
# order of the items. A bulk that has only coalesce keys, or only dedupe keys, is written by one statement. A freed
# dedupe key is locked by a statement of its own, so then all keys of the bulk are taken one by one.
ENQUEUE_KEYED = """
CREATE FUNCTION pgoutbox.enqueue_keyed(
    topics text[],
    payloads jsonb[],
    queues text[],
    destinations text[],
    coalesce_keys text[],
    dedupe_keys text[],
    available_ats timestamptz[],
    delays double precision[],
    expires_ats timestamptz[],
    headers jsonb[],
    max_attempts integer[],
    ordering_keys text[],
    on_failed text[],
    max_delays double precision[],
    coalesce_rules text[]
)
RETURNS TABLE (item_index integer, id bigint, duplicate boolean)
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $function$
#variable_conflict use_column
DECLARE
    item record;
    receipt bigint;
    written_indexes integer[];
    written_ids bigint[];
BEGIN
    IF num_nonnulls(dedupe_keys, ordering_keys, max_delays) = 0 THEN
        RETURN QUERY
        SELECT c.item_index, c.id, false
        FROM pgoutbox.enqueue_coalesced(
            topics, payloads, queues, destinations, coalesce_keys, available_ats, delays, expires_ats, headers,
            max_attempts, coalesce_rules
        ) AS c;
        RETURN;
    END IF;
    IF num_nonnulls(coalesce_keys, ordering_keys) = 0 AND NOT pgoutbox.has_freed_keys(topics, dedupe_keys) THEN
        SELECT array_agg(d.item_index), array_agg(d.id)
        INTO written_indexes, written_ids
        FROM pgoutbox.enqueue_deduped(
            topics, payloads, queues, destinations, dedupe_keys, available_ats, delays, expires_ats, headers,
            max_attempts
        ) AS d;
        RETURN QUERY
        SELECT w.item_index, w.id, false
        FROM unnest(written_indexes, written_ids) AS w(item_index, id);
        IF cardinality(written_indexes) = cardinality(array_remove(dedupe_keys, NULL)) THEN
            RETURN;
        END IF;
    END IF;
    FOR item IN
        SELECT a.*
        FROM pgoutbox.bulk_items(
            topics, payloads, queues, destinations, coalesce_keys, dedupe_keys, available_ats, delays, expires_ats,
            headers, max_attempts, ordering_keys, on_failed, max_delays, coalesce_rules
        ) AS a
        WHERE (
                num_nonnulls(a.dedupe_key, a.ordering_key) > 0
                OR (a.coalesce_key IS NOT NULL AND a.coalesce_rule IS DISTINCT FROM 'pending')
            )
            AND a.item_index NOT IN (SELECT unnest(written_indexes))
        ORDER BY
            CASE WHEN a.ordering_key IS NOT NULL THEN a.queue END COLLATE "C",
            a.ordering_key COLLATE "C",
            CASE WHEN a.coalesce_key IS NOT NULL AND a.coalesce_rule IS DISTINCT FROM 'pending' THEN a.topic END
                COLLATE "C",
            CASE WHEN a.coalesce_rule IS DISTINCT FROM 'pending' THEN a.coalesce_key END COLLATE "C",
            CASE WHEN a.ordering_key IS NULL THEN a.topic END COLLATE "C",
            CASE
                WHEN a.ordering_key IS NULL AND (a.coalesce_key IS NULL OR a.coalesce_rule = 'pending')
                    THEN a.dedupe_key
            END COLLATE "C",
            a.item_index
    LOOP
        receipt := pgoutbox.enqueue_checked(
            item.topic, item.payload, item.queue, item.destination, item.coalesce_key, item.dedupe_key,
            item.available_at, item.expires_at, item.headers, item.max_attempts, item.ordering_key, item.on_failed,
            item.max_delay, item.coalesce_rule, false
        );
        item_index := item.item_index;
        id := abs(receipt);
        duplicate := receipt < 0;
        RETURN NEXT;
    END LOOP;
END
$function$
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
    notify boolean DEFAULT true,
    ordering_keys text[] DEFAULT NULL,
    on_failed text[] DEFAULT NULL,
    max_delays double precision[] DEFAULT NULL,
    coalesce_rules text[] DEFAULT NULL
)
RETURNS TABLE (item_index integer, id bigint, duplicate boolean)
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
#variable_conflict use_column
DECLARE
    -- The transaction has its id before its messages have theirs: CLAIM_NEW of the worker relies on it.
    own_xid constant xid8 := pg_catalog.pg_current_xact_id();
    bad record;
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
        cardinality(max_attempts), cardinality(ordering_keys), cardinality(on_failed), cardinality(max_delays),
        cardinality(coalesce_rules)
    ) > cardinality(topics) THEN
        PERFORM pgoutbox.raise_argument_error('topics: no other array may have more elements');
    END IF;

    SELECT i.item_index, i.problem
    INTO bad
    FROM (
        SELECT a.item_index, CASE
            WHEN pgoutbox.is_plain(
                a.topic, a.payload, a.queue, a.destination, a.coalesce_key, a.dedupe_key, a.available_at,
                a.expires_at, a.headers, a.max_attempts, a.ordering_key, a.on_failed, a.max_delay, a.coalesce_rule
            ) THEN NULL
            ELSE pgoutbox.argument_error(
                a.topic, a.payload, a.queue, a.destination, a.coalesce_key, a.dedupe_key, a.available_at,
                a.expires_at, a.headers, a.max_attempts, a.ordering_key, a.on_failed, a.max_delay, a.coalesce_rule
            )
        END AS problem
        FROM pgoutbox.bulk_items(
            topics, payloads, queues, destinations, coalesce_keys, dedupe_keys, available_ats, delays, expires_ats,
            headers, max_attempts, ordering_keys, on_failed, max_delays, coalesce_rules
        ) AS a
    ) AS i
    WHERE i.problem IS NOT NULL
    ORDER BY i.item_index
    LIMIT 1;
    IF FOUND THEN
        PERFORM pgoutbox.raise_argument_error(bad.problem, bad.item_index);
    END IF;

    IF num_nonnulls(coalesce_keys, dedupe_keys, ordering_keys) = 0
        AND NOT EXISTS (SELECT FROM unnest(payloads) AS p(payload) WHERE pgoutbox.is_large(p.payload))
    THEN
        -- The ids are drawn in the order of the items.
        RETURN QUERY
        WITH inserted AS (
            INSERT INTO pgoutbox.message_live AS m (
                topic, payload, queue, destination, available_at, expires_at, headers, max_attempts, attempt_budget
            )
            SELECT
                a.topic, a.payload, a.queue, a.destination, greatest(a.available_at, now()), a.expires_at, a.headers,
                a.max_attempts, a.max_attempts
            FROM pgoutbox.bulk_items(
                topics, payloads, queues, destinations, coalesce_keys, dedupe_keys, available_ats, delays, expires_ats,
                headers, max_attempts, ordering_keys, on_failed, max_delays, coalesce_rules
            ) AS a
            RETURNING m.id
        )
        SELECT (row_number() OVER (ORDER BY i.id) - 1)::integer, i.id, false
        FROM inserted AS i;
    ELSE
        RETURN QUERY
        WITH item AS MATERIALIZED (
            SELECT a.*, nextval('pgoutbox.message_id_seq') AS id
            FROM pgoutbox.bulk_items(
                topics, payloads, queues, destinations, coalesce_keys, dedupe_keys, available_ats, delays, expires_ats,
                headers, max_attempts, ordering_keys, on_failed, max_delays, coalesce_rules
            ) AS a
            WHERE num_nonnulls(a.dedupe_key, a.ordering_key) = 0
                AND (a.coalesce_key IS NULL OR a.coalesce_rule = 'pending')
        ), large AS (
            INSERT INTO pgoutbox.large_payload (message_id, body)
            SELECT i.id, i.payload
            FROM item AS i
            WHERE pgoutbox.is_large(i.payload)
        ), inserted AS (
            INSERT INTO pgoutbox.message_live (
                id, topic, payload, queue, destination, available_at, expires_at, headers, max_attempts,
                attempt_budget, coalesce_key, coalesces_pending
            )
            SELECT
                i.id, i.topic, CASE WHEN NOT pgoutbox.is_large(i.payload) THEN i.payload END, i.queue, i.destination,
                greatest(i.available_at, now()), i.expires_at,
                i.headers, i.max_attempts, i.max_attempts, i.coalesce_key, nullif(i.coalesce_key IS NOT NULL, false)
            FROM item AS i
        )
        SELECT i.item_index, i.id, false
        FROM item AS i;
        RETURN QUERY
        SELECT k.item_index, k.id, k.duplicate
        FROM pgoutbox.enqueue_keyed(
            topics, payloads, queues, destinations, coalesce_keys, dedupe_keys, available_ats, delays, expires_ats,
            headers, max_attempts, ordering_keys, on_failed, max_delays, coalesce_rules
        ) AS k;
    END IF;

    IF notify IS NOT FALSE AND cardinality(topics) > 0 THEN
        PERFORM pgoutbox.ring(r.queue)
        FROM (
            SELECT DISTINCT coalesce(q.queue, 'default') AS queue
            FROM unnest(topics, queues) AS q(topic, queue)
        ) AS r;
    END IF;
END
$function$
"""

# One content, and one message with its own state for each destination.
ENQUEUE_FANOUT = """
CREATE FUNCTION pgoutbox.enqueue_fanout(
    topic text,
    payload jsonb,
    destinations text[],
    content jsonb DEFAULT NULL,
    queue text DEFAULT 'default',
    available_at timestamptz DEFAULT NULL,
    expires_at timestamptz DEFAULT NULL,
    headers jsonb DEFAULT NULL,
    max_attempts integer DEFAULT 11,
    notify boolean DEFAULT true
)
RETURNS TABLE (item_index integer, id bigint)
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
#variable_conflict use_column
DECLARE
    -- The transaction has its id before its messages have theirs: CLAIM_NEW of the worker relies on it.
    own_xid constant xid8 := pg_catalog.pg_current_xact_id();
    shared_id bigint;
    bad record;
BEGIN
    IF destinations IS NULL OR array_position(destinations, NULL) IS NOT NULL THEN
        PERFORM pgoutbox.raise_argument_error('destinations: must not be null, nor hold a null');
    END IF;
    SELECT (i.ordinality - 1)::integer AS item_index, i.problem
    INTO bad
    FROM (
        SELECT d.ordinality, pgoutbox.argument_error(
            enqueue_fanout.topic, enqueue_fanout.payload, enqueue_fanout.queue, d.destination, NULL, NULL,
            enqueue_fanout.available_at, enqueue_fanout.expires_at, enqueue_fanout.headers,
            enqueue_fanout.max_attempts, NULL, NULL, NULL, NULL
        ) AS problem
        FROM unnest(destinations) WITH ORDINALITY AS d(destination, ordinality)
    ) AS i
    WHERE i.problem IS NOT NULL
    ORDER BY i.ordinality
    LIMIT 1;
    IF FOUND THEN
        PERFORM pgoutbox.raise_argument_error(bad.problem, bad.item_index);
    END IF;
    IF pg_column_size(content) > 65536 AND octet_length(content::text) > 16777216 THEN
        PERFORM pgoutbox.raise_argument_error('content: must not have more than 16777216 bytes');
    END IF;
    IF content IS NOT NULL AND cardinality(destinations) > 0 THEN
        INSERT INTO pgoutbox.content AS c (body) VALUES (content) RETURNING c.id INTO shared_id;
    END IF;
    RETURN QUERY
    WITH item AS MATERIALIZED (
        SELECT d.destination, d.ordinality, nextval('pgoutbox.message_id_seq') AS id
        FROM unnest(destinations) WITH ORDINALITY AS d(destination, ordinality)
    ), large AS (
        INSERT INTO pgoutbox.large_payload (message_id, body)
        SELECT i.id, enqueue_fanout.payload
        FROM item AS i
        WHERE pgoutbox.is_large(enqueue_fanout.payload)
    ), inserted AS (
        INSERT INTO pgoutbox.message_live (
            id, topic, payload, queue, destination, content_id, available_at, expires_at, headers,
            max_attempts, attempt_budget
        )
        SELECT
            i.id, enqueue_fanout.topic,
            CASE WHEN NOT pgoutbox.is_large(enqueue_fanout.payload) THEN enqueue_fanout.payload END,
            enqueue_fanout.queue, i.destination, shared_id,
            greatest(enqueue_fanout.available_at, now()), enqueue_fanout.expires_at, enqueue_fanout.headers,
            enqueue_fanout.max_attempts, enqueue_fanout.max_attempts
        FROM item AS i
    )
    SELECT (i.ordinality - 1)::integer, i.id
    FROM item AS i;
    IF notify IS NOT FALSE AND cardinality(destinations) > 0 THEN
        PERFORM pgoutbox.ring(enqueue_fanout.queue);
    END IF;
END
$function$
"""

CANCEL_UNRECORDED = """
CREATE FUNCTION pgoutbox.cancel_unrecorded(message_id bigint, states text[])
RETURNS text
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    found_state text;
    ordered_queue text;
BEGIN
    IF message_id IS NULL THEN
        RAISE EXCEPTION USING
            ERRCODE = '22004', SCHEMA = 'pgoutbox', COLUMN = 'message_id',
            MESSAGE = 'pgoutbox.cancel: message_id: must not be null';
    END IF;
    -- A worker locks a row only for one statement. This function does not wait for a row: if the row moves to another
    -- partition during the wait, the caller's whole transaction fails.
    FOR trial IN 1..50 LOOP
        BEGIN
            SELECT m.state
            INTO found_state
            FROM pgoutbox.message AS m
            WHERE m.id = message_id AND m.state IN ('pending', 'sending') AND m.state = ANY (states)
            FOR UPDATE SKIP LOCKED;
            IF found_state = 'pending' THEN
                UPDATE pgoutbox.message AS m
                SET state = 'cancelled', finished_at = clock_timestamp()
                WHERE m.id = message_id AND m.state = 'pending'
                RETURNING CASE WHEN m.ordering_key IS NOT NULL THEN m.queue END INTO ordered_queue;
                IF ordered_queue IS NOT NULL THEN
                    PERFORM pgoutbox.ring(ordered_queue); -- Another message may now be the first of its key.
                END IF;
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
        END IF;
        IF found_state NOT IN ('pending', 'sending') AND current_setting('transaction_isolation') <> 'read committed'
        THEN
            -- The snapshot may be older than a redrive. Then the lock is refused, and the caller has to try again.
            PERFORM FROM pgoutbox.message AS m WHERE m.id = message_id AND m.state = found_state
            FOR KEY SHARE SKIP LOCKED;
        END IF;
        IF found_state = 'cancelled' THEN
            RETURN 'already_cancelled'; -- The audit records only the first cancel.
        ELSIF (found_state IN ('pending', 'sending') AND found_state = ANY (states)) IS NOT TRUE THEN
            RETURN found_state;
        END IF;
        PERFORM pg_sleep(0.002);
    END LOOP;
    RETURN 'locked';
END
$function$
"""

# `is_act` excludes the cancels of applications in their business transactions.
CANCEL = """
CREATE FUNCTION pgoutbox.cancel(message_id bigint, states text[] DEFAULT '{pending,sending}')
RETURNS text
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    result constant text := pgoutbox.cancel_unrecorded(message_id, states);
BEGIN
    IF result IN ('cancelled', 'requested') AND pgoutbox.is_act() THEN
        PERFORM pgoutbox.record_act('cancel', message_ids => ARRAY[message_id]);
    END IF;
    RETURN result;
END
$function$
"""

# The audit gets one row for all of them.
CANCEL_EACH = """
CREATE FUNCTION pgoutbox.cancel_each(message_ids bigint[], states text[])
RETURNS TABLE (id bigint, result text)
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
#variable_conflict use_column
DECLARE
    stopped bigint[] := '{}';
BEGIN
    FOR id IN SELECT DISTINCT asked.id FROM unnest(message_ids) AS asked(id) ORDER BY asked.id LOOP
        result := pgoutbox.cancel_unrecorded(id, states);
        IF result IN ('cancelled', 'requested') THEN
            stopped := stopped || id;
        END IF;
        RETURN NEXT;
    END LOOP;
    PERFORM pgoutbox.record_act('cancel', message_ids => stopped);
END
$function$
"""

# Its callers may not read the keys of other messages: they only get the result for the keys that they pass.
CANCEL_BY_KEY = """
CREATE FUNCTION pgoutbox.cancel_by_key(
    topic text, coalesce_key text DEFAULT NULL, dedupe_key text DEFAULT NULL
)
RETURNS TABLE (id bigint, result text)
LANGUAGE sql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
SELECT target.id, pgoutbox.cancel(target.id)
FROM (
    SELECT head.newest_id
    FROM pgoutbox.coalesce AS head
    WHERE head.topic = cancel_by_key.topic AND head.coalesce_key = cancel_by_key.coalesce_key
    UNION ALL
    SELECT d.message_id
    FROM pgoutbox.dedupe AS d
    WHERE d.topic = cancel_by_key.topic AND d.dedupe_key = cancel_by_key.dedupe_key
    UNION ALL
    -- With the rule `pending`, an older message would be delivered if only the newest one were cancelled.
    SELECT m.id
    FROM pgoutbox.message_live AS m
    WHERE m.topic = cancel_by_key.topic
        AND m.coalesce_key = cancel_by_key.coalesce_key
        AND m.coalesces_pending
        AND m.state = 'pending'
    UNION ALL
    SELECT m.id
    FROM pgoutbox.message_live AS m
    WHERE m.topic = cancel_by_key.topic
        AND m.coalesce_key = cancel_by_key.coalesce_key
        AND m.coalesces_pending
        AND m.state = 'sending'
) AS target(id)
ORDER BY target.id DESC
$function$
"""

# Functions run with their owner's privileges, so a superuser must not own them. Each revision calls this for its own
# new objects, which no other session can see yet: a migration locks no table that an enqueue uses. Only after a restore
# without the roles, the objects are in use. Then it takes the locks in the order of an enqueue (sequence, keys,
# message, message_live), and releases all of them unless it gets the last one within 200 ms. PostgreSQL looks for a
# deadlock after deadlock_timeout, one second by default, so no deadlock ends a business transaction.
HAND_OVER = """
CREATE FUNCTION pgoutbox.hand_over()
RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    heir constant name := (
        SELECT CASE WHEN o.rolsuper THEN 'pgoutbox_owner' ELSE o.rolname END
        FROM pg_class AS c
        JOIN pg_roles AS o ON o.oid = c.relowner
        WHERE c.oid = 'pgoutbox.message'::regclass
    );
    lock_timeout_ms constant integer := (SELECT s.setting FROM pg_settings AS s WHERE s.name = 'lock_timeout');
    began_at constant timestamptz := clock_timestamp();
    trial_ends_at timestamptz;
    owned record;
BEGIN
    IF NOT (SELECT r.rolsuper FROM pg_roles AS r WHERE r.rolname = current_user) THEN
        RETURN;
    END IF;
    IF to_regrole(heir) IS NULL THEN
        BEGIN
            EXECUTE 'CREATE ROLE ' || quote_ident(heir) || ' NOLOGIN';
        EXCEPTION WHEN duplicate_object OR unique_violation THEN
            NULL; -- The migration of another database was faster.
        END;
    END IF;
    IF (SELECT n.nspowner FROM pg_namespace AS n WHERE n.nspname = 'pgoutbox') = current_user::regrole THEN
        EXECUTE 'ALTER SCHEMA pgoutbox OWNER TO ' || quote_ident(heir);
    END IF;
    LOOP
        trial_ends_at := clock_timestamp() + interval '200 ms';
        BEGIN
            FOR owned IN
                SELECT o.command
                FROM (
                    SELECT
                        1 AS part,
                        CASE WHEN c.relkind = 'v' THEN 0 ELSE array_position(
                            '{message_id_seq,dedupe,ordering,coalesce,message,message_live}'::name[], c.relname
                        ) END AS place,
                        c.oid,
                        CASE c.relkind
                            -- The sequence belongs to the table message and follows it. This only locks it.
                            WHEN 'S' THEN 'ALTER SEQUENCE pgoutbox.message_id_seq SET LOGGED'
                            ELSE 'ALTER TABLE pgoutbox.' || quote_ident(c.relname) || ' OWNER TO ' || quote_ident(heir)
                        END AS command
                    FROM pg_class AS c
                    WHERE c.relnamespace = 'pgoutbox'::regnamespace
                        AND (c.relkind IN ('r', 'p', 'v') OR c.oid = 'pgoutbox.message_id_seq'::regclass)
                        AND c.relowner = current_user::regrole
                    UNION ALL
                    SELECT
                        2,
                        NULL,
                        p.oid,
                        'ALTER ROUTINE ' || p.oid::regprocedure::text || ' OWNER TO ' || quote_ident(heir)
                    FROM pg_proc AS p
                    WHERE p.pronamespace = 'pgoutbox'::regnamespace AND p.proowner = current_user::regrole
                ) AS o
                ORDER BY o.part, o.place NULLS LAST, o.oid
            LOOP
                PERFORM set_config(
                    'lock_timeout',
                    greatest(1, ceil(extract(epoch FROM trial_ends_at - clock_timestamp()) * 1000))::text,
                    true
                );
                EXECUTE owned.command;
            END LOOP;
            EXIT;
        EXCEPTION WHEN lock_not_available THEN
            IF lock_timeout_ms > 0 AND clock_timestamp() > began_at + make_interval(secs => lock_timeout_ms / 1000.0)
            THEN
                RAISE;
            END IF;
        END;
        PERFORM pg_sleep(0.05); -- Let waiting sessions go on.
    END LOOP;
    PERFORM set_config('lock_timeout', lock_timeout_ms::text, true);
END
$function$
"""
HAND_OVER_NOW = """
DO $block$
BEGIN
    PERFORM pgoutbox.hand_over();
END
$block$
"""

TABLE_COMMENTS = {
    "message": "One row per message, partitioned by state: live (pending, sending), failed, done (the others).",
    "message_live": "Messages that are pending or sending.",
    "message_failed": "Messages that failed permanently; they wait for an operator (redrive or prune).",
    "message_done": "Finished messages: sent, skipped, cancelled. Partitioned by time for retention.",
    "large_payload": "The payloads of messages whose column payload is null; each is deleted with its message.",
    "attempt": "Attempts that did not end as sent, with their errors. A sent message stores its last attempt itself.",
    "renewal": "Leases that were renewed while a transaction that cancels the message had its row locked.",
    "queue": "Settings of a queue. A queue without a row has no limits.",
    "retention": "How long final messages are kept, by topic and state. Without a rule they are never deleted.",
    "coalesce": "The newest message of each topic and coalesce key. Older messages are superseded.",
    "ordering": "The last message of each queue and ordering key; locked while enqueue draws the next id.",
    "dedupe": "The message of each topic and dedupe key.",
    "content": "Shared contents of fan-outs; deleted with their last message.",
    "breaker": "Open circuit breakers of transports and destinations. A working one has no row.",
    "audit": "Manual changes by operators: a row for each batch of an act.",
}

COLUMN_COMMENTS = {
    "message": {
        "id": "Grows with every enqueue. The newest ids of a coalesce key grow in the order of the commits.",
        "created_at": "Start of the transaction that enqueued the message.",
        "available_at": "Earliest claim of a pending message.",
        "expires_at": "Time after which the message is skipped if it was not handed over.",
        "claimed_at": "Start of the last attempt.",
        "lease_expires_at": "When the attempt in flight counts as lost unless its worker renews the lease.",
        "cancel_requested_at": "When the attempt in flight was asked to cancel. It is not retried.",
        "finished_at": "When the message reached its final state.",
        "superseded_by": "The newer message of the same coalesce key that superseded this one.",
        "resend_of": "The message of which an operator enqueued this copy.",
        "content_id": "The shared content of a fan-out.",
        "attempt_count": "Number of attempts so far, and the fencing token: up by one at each claim, never down.",
        "max_attempts": "The attempt after which a transient failure is final. Snooze, release and redrive raise it.",
        "attempt_budget": "Number of attempts that enqueue granted. Each redrive grants as many again.",
        "state": "pending, sending, sent, failed, skipped or cancelled.",
        "topic": "Kind of the message; selects the handler.",
        "queue": "The queue, which has its own workers, limits and pause.",
        "destination": "The receiver, as a URI.",
        "coalesce_key": "Of the messages with one topic and coalesce key only the newest committed one is delivered.",
        "coalesces_pending": "True: the rule pending. Of the due messages of a key, a claim delivers the newest.",
        "dedupe_key": "At most one message has this topic and dedupe key, besides cancelled and skipped ones.",
        "ordering_key": "Messages of one queue and ordering key are delivered one after the other, in order of ids.",
        "on_failed": "halt: if this message fails, later messages of its ordering key wait for redrive or prune.",
        "worker": "The worker of the current or last attempt.",
        "skip_reason": "Reason for which the message was skipped.",
        "last_error": "Error or snooze reason of the last attempt, cut at 4000 characters.",
        "payload": "Input of the handler. Contains no usable secret. Null: the payload is in large_payload; "
        "pgoutbox.payload_of(message) returns it from either place.",
        "headers": "Texts that travel with the message, for example a trace context.",
    },
    "large_payload": {
        "message_id": "The message.",
        "body": "Its payload.",
    },
    "attempt": {
        "message_id": "The message.",
        "attempt_count": "Number of the attempt: its fencing token.",
        "outcome": "retry, failed, skipped, cancelled, snoozed, released or lost.",
        "worker": "The worker that made the attempt.",
        "started_at": "Time of the claim.",
        "ended_at": "When the outcome was written.",
        "error": "Error message, cut at 4000 characters.",
        "reason_code": "Why pgoutbox postponed the message: circuit_open, stalled or unavailable. Else null.",
        "breaker_key": "The circuit breaker that postponed it, for circuit_open and stalled.",
    },
    "renewal": {
        "message_id": "The message.",
        "lease_expires_at": "When the attempt counts as lost; the lease in the message ends earlier.",
        "attempt_count": "The attempt in flight.",
        "worker": "The worker of the attempt.",
    },
    "queue": {
        "name": "The name in the column queue of messages.",
        "paused_at": "Start of the pause; null: the queue is not paused.",
        "resume_at": "Automatic end of the pause; null: an operator must resume the queue.",
        "tokens_at": "Time at which tokens was computed.",
        "rate_seconds": "Length of the period in which rate_count attempts may begin.",
        "tokens": "Tokens in the bucket at tokens_at. Each claim takes its tokens before it sends.",
        "rate_count": "Number of attempts that may begin in each period, in the whole fleet. Null: unlimited.",
        "burst": "Capacity of the bucket: the number of attempts that may begin at once after an idle time.",
        "max_in_flight": "Number of attempts that may be in flight at once, in the whole fleet. Null: unlimited.",
    },
    "retention": {
        "keep": "Time to keep the messages. Zero deletes sent messages as they are sent; null never deletes them.",
        "topic": "A topic, or * for every topic without a rule of its own for the state.",
        "state": "sent, failed, skipped or cancelled; or dedupe_key, for keys whose message is deleted.",
    },
    "coalesce": {
        "newest_id": "The newest committed message of the key.",
        "waiting_since": "When the first message of the current wait was enqueued with a max_delay.",
        "topic": "The topic.",
        "coalesce_key": "The key.",
    },
    "ordering": {
        "last_id": "The last message of the key.",
        "queue": "The queue.",
        "ordering_key": "The key.",
    },
    "dedupe": {
        "message_id": "The message with this key. If it is cancelled or skipped, the next message takes the key.",
        "created_at": "When that message was enqueued.",
        "topic": "The topic.",
        "dedupe_key": "The key.",
        "payload_digest": "SHA-256 of the payload, or of the digest in an encrypted one. It tells a repeated message "
        "from a different one with the same key.",
    },
    "content": {
        "id": "The id in the column content_id of messages.",
        "created_at": "Start of the transaction that enqueued the fan-out.",
        "body": "The content, read by the handlers of its messages.",
    },
    "audit": {
        "id": "Grows with every row.",
        "acted_at": "Time of the change.",
        "act_id": "The same for all batches of one act.",
        "message_count": "Number of messages that the batch changed; null for an act on a queue or a rule.",
        "actor": "The person, as known to the command line or the dashboard; else the role.",
        "db_role": "The database role of the session.",
        "origin": "The command line or the dashboard, and the client address.",
        "action": "redrive, resend, cancel, prune, pause, resume, limit or retention.",
        "queue": "The queue that was paused, resumed or limited.",
        "message_ids": "The changed messages; null for prune.",
        "details": "Parameters of the act: the filter, the limit or the rule.",
    },
    "breaker": {
        "key": "The name that the transport gives to the dead transport or destination.",
        "opened_at": "When the breaker opened. Since then only probes are sent.",
        "retry_at": "When one message may be sent as a probe.",
        "cooldown_seconds": "Length of the last pause. A failed probe doubles it.",
        "probe_id": "The current probe: the fence of its outcome.",
        "probe_until": "When that probe counts as lost and another one may be sent.",
        "worker": "The worker that opened the breaker or sent the last probe.",
        "last_error": "Error message, cut at 4000 characters.",
    },
}

FUNCTION_COMMENTS = {
    "schema_version()": "The version of this schema; workers refuse an older one than they need.",
    "enqueue": "Write one message in this transaction and wake a sleeping worker when it commits. Returns the id; "
    "if another message has the dedupe key, the id of that message.",
    "enqueue_many": "Enqueue arrays of messages in this transaction; a null array or element means the default.",
    "enqueue_fanout": "Enqueue one message for each destination in this transaction, and the shared content once.",
    "bulk_items": "The items of enqueue_many as rows, with their defaults.",
    "enqueue_keyed": "Enqueue the items of enqueue_many that have keys which are locked, in the order of the keys.",
    "enqueue_coalesced": "Enqueue the items of enqueue_many that have only a coalesce key of the rule newest.",
    "enqueue_deduped": "Enqueue the items of enqueue_many that have only a dedupe key, if no message has the key yet.",
    "enqueue_receipt": "enqueue without defaults. The id is negative if the message already existed.",
    "enqueue_checked": "enqueue_receipt for messages with keys, options or invalid arguments.",
    "write_message": "Insert one valid message and wake a sleeping worker when the transaction commits.",
    "is_large": "Whether a payload is too large for the row of its message, and is stored in large_payload.",
    "payload_of": "The payload of a message, from its row or from large_payload.",
    "is_plain": "Whether no more than topic, payload, queue, max_attempts and a coalesce key of the rule pending "
    "are given, and these are valid.",
    "payload_digests": "Digests by which enqueue recognizes a repeated payload; several for an encrypted one.",
    "next_id": "The next id of a key with this newest id. Raises 55000 if it is not greater.",
    "has_freed_keys": "Whether has_freed_key is true for the message of one of these dedupe keys.",
    "has_freed_key": "Whether a message was cancelled or skipped, so that the next message takes its dedupe key.",
    "cancel": "Cancel a message in this transaction, if it is in one of the states. Returns cancelled, requested (an "
    "attempt is in flight: its handler is notified, and it is not retried), the other state of the message, locked "
    "(the row stayed locked: try again), missing, or already_cancelled if it was cancelled before.",
    "cancel_each": "Cancel messages like cancel, and record it as one act of an operator.",
    "cancel_unrecorded": "cancel without the audit.",
    "record_act": "Add a row to the audit, with the actor of the transaction, or else the role of the session.",
    "is_act": "Whether this session or transaction belongs to an operator, not to an application or a worker.",
    "record_queue_act": "Record a pause, its end, or new limits of a queue in the audit.",
    "record_retention_act": "Record a change of a retention rule in the audit.",
    "record_breaker_act": "Record in the audit that an operator closed a breaker.",
    "cancel_by_key": "Cancel the newest message of a coalesce key (by the rule pending, every pending one and the one "
    "in flight), and the message of a dedupe key, like cancel. The newest message comes first.",
    "argument_error": "The first invalid argument of enqueue, as name and reason; null if all are valid.",
    "raise_argument_error": "Raise 22004 or 22023 with the name of the argument as column.",
    "newer_pending": "A newer pending message of a coalesce key that supersedes this one by the rule pending; null if "
    "there is none that falls due by then.",
    "lock_newer_pending": "The same for a claim, locked and still pending; zero if another session has locked it.",
    "has_strict_due": "Whether the newest message of a coalesce key by the rule newest is due in this queue.",
    "tokens_of": "Tokens of a limited queue now, as a fraction; null without a rate.",
    "renewed_until": "End of the lease in the table renewal; null for most attempts.",
    "is_limited": "Whether a queue is paused or has limits, so that claims need permits.",
    "take_turn": "Wait until at most one other claim chooses from the backlog of a queue. Gives up after 250 ms.",
    "in_flight_of": "Number of attempts of a queue in flight, counted up to at_most.",
    "permits": "Number of attempts of a queue that may begin now, up to wanted. Locks a queue with limits.",
    "next_permit_at": "When the next attempt of a queue may begin: null now, infinity while paused without an end.",
    "ring": "Wake the sleeping workers of a queue when this transaction commits.",
    "hand_over": "Give all objects of the calling superuser to the owner of the tables, or to pgoutbox_owner if that "
    "owner is a superuser. Does nothing for other callers.",
}

FUNCTIONS = (
    SCHEMA_VERSION,
    ARGUMENT_ERROR,
    IS_LARGE,
    PAYLOAD_OF,
    IS_PLAIN,
    RAISE_ARGUMENT_ERROR,
    RING,
    NEWER_PENDING,
    LOCK_NEWER_PENDING,
    HAS_STRICT_DUE,
    TOKENS_OF,
    RENEWED_UNTIL,
    IS_LIMITED,
    TAKE_TURN,
    IN_FLIGHT_OF,
    NEXT_PERMIT_AT,
    PERMITS,
    WRITE_MESSAGE,
    PAYLOAD_DIGESTS,
    HAS_FREED_KEY,
    NEXT_ID,
    ENQUEUE_CHECKED,
    ENQUEUE_RECEIPT,
    ENQUEUE,
    BULK_ITEMS,
    ENQUEUE_COALESCED,
    ENQUEUE_DEDUPED,
    HAS_FREED_KEYS,
    ENQUEUE_KEYED,
    ENQUEUE_MANY,
    ENQUEUE_FANOUT,
    RECORD_ACT,
    IS_ACT,
    RECORD_QUEUE_ACT,
    QUEUE_ACTS,
    RECORD_RETENTION_ACT,
    RETENTION_ACTS,
    RECORD_BREAKER_ACT,
    BREAKER_ACTS,
    CANCEL_UNRECORDED,
    CANCEL,
    CANCEL_EACH,
    CANCEL_BY_KEY,
    HAND_OVER,
)

REVOKE = "REVOKE ALL ON ALL FUNCTIONS IN SCHEMA pgoutbox FROM PUBLIC"

DOWN = (
    "DROP FUNCTION pgoutbox.hand_over",
    "DROP FUNCTION pgoutbox.cancel_by_key",
    "DROP FUNCTION pgoutbox.cancel_each",
    "DROP FUNCTION pgoutbox.cancel",
    "DROP FUNCTION pgoutbox.cancel_unrecorded",
    "DROP FUNCTION pgoutbox.record_breaker_act CASCADE",
    "DROP FUNCTION pgoutbox.record_retention_act CASCADE",
    "DROP FUNCTION pgoutbox.record_queue_act CASCADE",
    "DROP FUNCTION pgoutbox.is_act",
    "DROP FUNCTION pgoutbox.record_act",
    "DROP FUNCTION pgoutbox.enqueue_fanout",
    "DROP FUNCTION pgoutbox.enqueue_many",
    "DROP FUNCTION pgoutbox.enqueue_keyed",
    "DROP FUNCTION pgoutbox.has_freed_keys",
    "DROP FUNCTION pgoutbox.enqueue_deduped",
    "DROP FUNCTION pgoutbox.enqueue_coalesced",
    "DROP FUNCTION pgoutbox.bulk_items",
    "DROP FUNCTION pgoutbox.enqueue",
    "DROP FUNCTION pgoutbox.enqueue_receipt",
    "DROP FUNCTION pgoutbox.enqueue_checked",
    "DROP FUNCTION pgoutbox.next_id",
    "DROP FUNCTION pgoutbox.has_freed_key",
    "DROP FUNCTION pgoutbox.payload_digests",
    "DROP FUNCTION pgoutbox.write_message",
    "DROP FUNCTION pgoutbox.permits",
    "DROP FUNCTION pgoutbox.next_permit_at",
    "DROP FUNCTION pgoutbox.in_flight_of",
    "DROP FUNCTION pgoutbox.renewed_until",
    "DROP FUNCTION pgoutbox.take_turn",
    "DROP FUNCTION pgoutbox.is_limited",
    "DROP FUNCTION pgoutbox.tokens_of",
    "DROP FUNCTION pgoutbox.ring",
    "DROP FUNCTION pgoutbox.has_strict_due",
    "DROP FUNCTION pgoutbox.lock_newer_pending",
    "DROP FUNCTION pgoutbox.newer_pending",
    "DROP FUNCTION pgoutbox.raise_argument_error",
    "DROP FUNCTION pgoutbox.is_plain",
    "DROP FUNCTION pgoutbox.payload_of",
    "DROP FUNCTION pgoutbox.is_large",
    "DROP FUNCTION pgoutbox.argument_error",
    "DROP TABLE pgoutbox.audit",
    "DROP TABLE pgoutbox.retention",
    "DROP TABLE pgoutbox.content",
    "DROP TABLE pgoutbox.breaker",
    "DROP TABLE pgoutbox.dedupe",
    "DROP TABLE pgoutbox.ordering",
    "DROP TABLE pgoutbox.coalesce",
    "DROP TABLE pgoutbox.queue",
    "DROP TABLE pgoutbox.renewal",
    "DROP TABLE pgoutbox.attempt",
    "DROP TABLE pgoutbox.large_payload",
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

# The schema and the version table may remain. The role remains if it has rights in another database. PostgreSQL fails
# with an internal error where that database is dropped at the same moment.
TAKE_DOWN_OWNER = """
DO $block$
BEGIN
    IF to_regrole('pgoutbox_owner') IS NULL
        OR NOT (SELECT r.rolsuper FROM pg_catalog.pg_roles AS r WHERE r.rolname = current_user)
    THEN
        RETURN;
    END IF;
    REASSIGN OWNED BY pgoutbox_owner TO CURRENT_USER;
    IF NOT EXISTS (
        SELECT
        FROM pg_catalog.pg_auth_members AS m
        WHERE m.roleid = 'pgoutbox_owner'::regrole AND m.member <> current_user::regrole
    ) THEN
        BEGIN
            DROP ROLE pgoutbox_owner;
        EXCEPTION WHEN dependent_objects_still_exist OR undefined_object OR internal_error THEN
            NULL;
        END;
    END IF;
END
$block$
"""


def upgrade() -> None:
    for statement in (
        SCHEMA, SCHEMA_COMMENT, SEQUENCE, MESSAGE, MESSAGE_LIVE, MESSAGE_FAILED, MESSAGE_DONE, MESSAGE_DONE_DEFAULT,
        MESSAGE_DONE_FINISHED, LIVE_FRESH, LIVE_RETRY, LIVE_LEASE, LIVE_IN_FLIGHT, LIVE_NEWER, LIVE_ORDERED,
        LIVE_ORDERED_DUE, LIVE_ORDERED_IN_FLIGHT, FAILED_HALTS, FAILED_COALESCED, FAILED_ORDERED,
        CANCELLED_COALESCED, CANCELLED_ORDERED, MESSAGE_CONTENT, LARGE_PAYLOAD, LARGE_PAYLOAD_IN_PLACE,
        ATTEMPT, RENEWAL, QUEUE, COALESCE, ORDERING,
        DEDUPE, CONTENT, BREAKER, RETENTION, AUDIT, AUDIT_MESSAGES, *FUNCTIONS, REVOKE,
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
    op.execute(HAND_OVER_NOW)


def downgrade() -> None:
    for statement in (*DOWN, DROP_SCHEMA_IF_EMPTY, TAKE_DOWN_OWNER):
        op.execute(statement)
