"""Partitions of message_done by time: the functions that create them ahead, detach and drop them, and the table that
coordinates the workers.

The functions run with the privileges of the schema's owner, so that a worker needs none. They generate the names in
their dynamic SQL, or read them from the catalog. As in the first revision no statement contains a percent sign, so
names are quoted by quote_ident. Times are read and written as text there: UTC and ISO are the only unambiguous choice.
Each function first locks the table retired, which only the owner may lock. Every login could take an advisory lock.
"""

from __future__ import annotations

from alembic import op

revision = "pgoutbox_0002"
down_revision = "pgoutbox_0001"
branch_labels = None
depends_on = None


SCHEMA_VERSION = """
CREATE OR REPLACE FUNCTION pgoutbox.schema_version()
RETURNS integer
LANGUAGE sql
IMMUTABLE
PARALLEL SAFE
AS 'SELECT {version}'
"""

UPKEEP = """
CREATE TABLE pgoutbox.upkeep (
    due_at    timestamptz NOT NULL,
    began_at  timestamptz NOT NULL,
    is_single boolean     NOT NULL DEFAULT true,
    worker    text        NOT NULL,
    CONSTRAINT upkeep_pkey PRIMARY KEY (is_single),
    CONSTRAINT upkeep_single CHECK (is_single)
) WITH (fillfactor = 50)
"""

RETIRED = """
CREATE TABLE pgoutbox.retired (
    retired_at timestamptz NOT NULL DEFAULT now(),
    cleared_id bigint      NOT NULL DEFAULT 0,
    name       text COLLATE "C" NOT NULL,
    CONSTRAINT retired_pkey PRIMARY KEY (name),
    CONSTRAINT retired_name_sound CHECK (name ~ '^message_done_[0-9]{8}$')
)
"""

PARTITIONS = r"""
CREATE FUNCTION pgoutbox.partitions()
RETURNS TABLE (name text, lower_at timestamptz, upper_at timestamptz)
LANGUAGE sql
STABLE
SET search_path = pg_catalog, pg_temp
SET timezone = 'UTC'
SET datestyle = 'ISO, YMD'
AS $function$
    SELECT c.relname::text, bounds[1]::timestamptz, bounds[2]::timestamptz
    FROM pg_inherits AS i
    JOIN pg_class AS c ON c.oid = i.inhrelid
    CROSS JOIN LATERAL regexp_match(
        pg_get_expr(c.relpartbound, c.oid), $pattern$^FOR VALUES FROM \('([^']+)'\) TO \('([^']+)'\)$$pattern$
    ) AS bounds
    WHERE i.inhparent = 'pgoutbox.message_done'::regclass AND bounds IS NOT NULL
    ORDER BY bounds[1]::timestamptz
$function$
"""

# If every message in one of these states has a rule that deletes it, the longest rule gives the time when all messages
# of a period are deleted. Otherwise only the messages themselves show it.
KEPT_UNTIL = """
CREATE FUNCTION pgoutbox.kept_until(lower_at timestamptz, upper_at timestamptz)
RETURNS timestamptz
LANGUAGE plpgsql
VOLATILE
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET timezone = 'UTC'
SET datestyle = 'ISO, YMD'
AS $function$
DECLARE
    latest timestamptz;
BEGIN
    SELECT max(upper_at + r.keep)
    INTO latest
    FROM pgoutbox.retention AS r
    WHERE r.state IN ('sent', 'skipped', 'cancelled')
    HAVING bool_and(r.keep IS NOT NULL) AND count(*) FILTER (WHERE r.topic = '*') = 3;
    IF latest IS NOT NULL THEN
        RETURN latest;
    END IF;
    SELECT max(coalesce(ended.last_at + rule.keep, 'infinity'))
    INTO latest
    FROM (
        SELECT m.state, m.topic, max(m.finished_at) AS last_at
        FROM pgoutbox.message_done AS m
        WHERE m.finished_at >= lower_at AND m.finished_at < upper_at
        GROUP BY m.state, m.topic
    ) AS ended
    LEFT JOIN LATERAL (
        SELECT r.keep
        FROM pgoutbox.retention AS r
        WHERE r.state = ended.state AND r.topic IN (ended.topic, '*')
        ORDER BY r.topic = '*'
        LIMIT 1
    ) AS rule ON true;
    RETURN coalesce(latest, '-infinity');
END
$function$
"""

# The search for the first day without a partition starts today, not after the last partition: a clock that was ahead
# for a moment leaves partitions weeks ahead. ATTACH locks message_done in a mode that blocks neither writers nor
# readers, and the default partition exclusively. It also reads all of the default partition, hence the limit on its
# size. It only waits for the default partition, and only if a partition must be created.
MAKE_PARTITION = """
CREATE FUNCTION pgoutbox.make_partition(largest_default bigint DEFAULT 134217728)
RETURNS text
LANGUAGE plpgsql
VOLATILE
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET timezone = 'UTC'
SET datestyle = 'ISO, YMD'
SET lock_timeout = '100ms'
AS $function$
DECLARE
    from_at timestamptz := date_trunc('day', now());
    horizon constant timestamptz := from_at + interval '7 days';
    to_at timestamptz;
    covered_until timestamptz;
    weekly boolean;
    made text;
BEGIN
    BEGIN
        LOCK TABLE pgoutbox.retired IN SHARE ROW EXCLUSIVE MODE NOWAIT;
    EXCEPTION WHEN lock_not_available THEN
        RETURN NULL;
    END;
    SELECT
        coalesce(
            bool_or(r.keep IS NULL)
            OR max(r.keep) > interval '62 days'
            OR count(*) FILTER (WHERE r.topic = '*') < 3,
            true
        )
    INTO weekly
    FROM pgoutbox.retention AS r
    WHERE r.state IN ('sent', 'skipped', 'cancelled');
    LOOP
        IF from_at >= horizon THEN
            RETURN NULL;
        END IF;
        SELECT
            max(p.upper_at) FILTER (WHERE p.lower_at <= from_at AND p.upper_at > from_at),
            least(
                CASE WHEN weekly THEN date_trunc('week', from_at) ELSE from_at END
                    + CASE WHEN weekly THEN interval '7 days' ELSE interval '1 day' END,
                min(p.lower_at) FILTER (WHERE p.lower_at > from_at)
            )
        INTO covered_until, to_at
        FROM pgoutbox.partitions() AS p;
        made := 'message_done_' || to_char(from_at, 'YYYYMMDD');
        -- A table of this name may be retired and not dropped yet.
        EXIT WHEN covered_until IS NULL
            AND to_regclass('pgoutbox.' || made) IS NULL
            AND NOT EXISTS (
                SELECT
                FROM ONLY pgoutbox.message_done_default AS m
                WHERE m.finished_at >= from_at AND m.finished_at < to_at
            );
        from_at := coalesce(covered_until, from_at + interval '1 day');
    END LOOP;
    IF pg_relation_size('pgoutbox.message_done_default') > largest_default THEN
        RAISE EXCEPTION 'message_done_default has more than largest_default bytes' USING
            ERRCODE = 'object_not_in_prerequisite_state',
            HINT = 'Delete old messages and vacuum, or give a larger limit while little is sent.';
    END IF;
    LOCK TABLE ONLY pgoutbox.message_done IN SHARE UPDATE EXCLUSIVE MODE;
    LOCK TABLE ONLY pgoutbox.message_done_default IN ACCESS EXCLUSIVE MODE;
    IF EXISTS (
        SELECT
        FROM ONLY pgoutbox.message_done_default AS m
        WHERE m.finished_at >= from_at AND m.finished_at < to_at
    ) THEN
        RETURN NULL; -- The message came before the lock.
    END IF;
    EXECUTE 'CREATE TABLE pgoutbox.' || quote_ident(made) || ' (LIKE pgoutbox.message_done INCLUDING ALL)';
    EXECUTE 'ALTER TABLE pgoutbox.message_done ATTACH PARTITION pgoutbox.' || quote_ident(made)
        || ' FOR VALUES FROM (' || quote_literal(from_at) || ') TO (' || quote_literal(to_at) || ')';
    RETURN made;
END
$function$
"""

# The messages of the partition are read, if necessary, under locks against writes to it and changes of rules. Then it
# is detached. DETACH waits for all users of message_done, and later users wait behind it, for at most lock_timeout.
RETIRE_PARTITION = """
CREATE FUNCTION pgoutbox.retire_partition(partition_name text)
RETURNS text
LANGUAGE plpgsql
VOLATILE
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET timezone = 'UTC'
SET datestyle = 'ISO, YMD'
SET lock_timeout = '100ms'
AS $function$
DECLARE
    found_lower_at timestamptz;
    found_upper_at timestamptz;
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'retire_partition must see what is committed when it has its lock' USING
            ERRCODE = 'invalid_transaction_state',
            HINT = 'Use READ COMMITTED.';
    END IF;
    BEGIN
        LOCK TABLE pgoutbox.retired IN SHARE ROW EXCLUSIVE MODE NOWAIT;
    EXCEPTION WHEN lock_not_available THEN
        RETURN 'busy';
    END;
    SELECT p.lower_at, p.upper_at
    INTO found_lower_at, found_upper_at
    FROM pgoutbox.partitions() AS p
    WHERE p.name = partition_name AND p.name ~ '^message_done_[0-9]{8}$';
    IF NOT FOUND THEN
        RETURN 'missing';
    ELSIF found_upper_at > now() THEN
        RETURN 'kept';
    END IF;
    LOCK TABLE pgoutbox.retention IN SHARE MODE;
    EXECUTE 'LOCK TABLE ONLY pgoutbox.' || quote_ident(partition_name) || ' IN SHARE ROW EXCLUSIVE MODE';
    IF pgoutbox.kept_until(found_lower_at, found_upper_at) > now() THEN
        RETURN 'kept';
    END IF;
    INSERT INTO pgoutbox.retired (name) VALUES (partition_name);
    EXECUTE 'ALTER TABLE pgoutbox.message_done DETACH PARTITION pgoutbox.' || quote_ident(partition_name);
    IF pgoutbox.is_act() THEN
        PERFORM pgoutbox.record_act('prune', details => jsonb_build_object('partition', partition_name));
    END IF;
    RETURN 'retired';
END
$function$
"""

# Only this function uses a detached table. If a rule deletes sent messages at once, their dedupe keys stay here too.
CLEAR_RETIRED = """
CREATE FUNCTION pgoutbox.clear_retired(page_size integer)
RETURNS TABLE (name text, cleared_count bigint, is_dropped boolean)
LANGUAGE plpgsql
VOLATILE
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET timezone = 'UTC'
SET datestyle = 'ISO, YMD'
SET lock_timeout = '100ms'
AS $function$
DECLARE
    chosen pgoutbox.retired;
    first_id bigint;
    last_id bigint;
BEGIN
    BEGIN
        LOCK TABLE pgoutbox.retired IN SHARE ROW EXCLUSIVE MODE NOWAIT;
    EXCEPTION WHEN lock_not_available THEN
        RETURN;
    END;
    SELECT r.* INTO chosen FROM pgoutbox.retired AS r ORDER BY r.name LIMIT 1 FOR UPDATE;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    name := chosen.name;
    cleared_count := 0;
    EXECUTE 'SELECT min(m.id), max(m.id) FROM pgoutbox.' || quote_ident(chosen.name) || ' AS m WHERE m.id > $1'
        INTO first_id, last_id
        USING chosen.cleared_id;
    is_dropped := first_id IS NULL
        OR NOT EXISTS (SELECT FROM pgoutbox.dedupe)
        AND NOT EXISTS (SELECT FROM pgoutbox.attempt AS a WHERE a.message_id BETWEEN first_id AND last_id)
        AND NOT EXISTS (SELECT FROM pgoutbox.large_payload AS l WHERE l.message_id BETWEEN first_id AND last_id);
    IF NOT is_dropped THEN
        EXECUTE '
            WITH page AS MATERIALIZED (
                SELECT m.id, m.topic, m.state, m.dedupe_key, m.payload IS NULL AS has_large_payload
                FROM pgoutbox.' || quote_ident(chosen.name) || ' AS m
                WHERE m.id > $1
                ORDER BY m.id
                LIMIT $2
            ), history AS (
                DELETE FROM pgoutbox.attempt AS a
                USING page AS p
                WHERE a.message_id = p.id
            ), large AS (
                DELETE FROM pgoutbox.large_payload AS l
                USING page AS p
                WHERE l.message_id = p.id AND p.has_large_payload
            ), keys AS (
                DELETE FROM pgoutbox.dedupe AS d
                USING page AS p
                WHERE d.topic = p.topic
                    AND d.dedupe_key = p.dedupe_key
                    AND d.message_id = p.id
                    AND (
                        SELECT r.keep
                        FROM pgoutbox.retention AS r
                        WHERE r.state = p.state AND r.state = ''sent'' AND r.topic IN (p.topic, ''*'')
                        ORDER BY r.topic = ''*''
                        LIMIT 1
                    ) IS DISTINCT FROM interval ''0''
            )
            SELECT max(p.id), count(*) FROM page AS p'
            INTO last_id, cleared_count
            USING chosen.cleared_id, page_size;
        is_dropped := cleared_count < page_size;
    END IF;
    IF is_dropped THEN
        EXECUTE 'DROP TABLE pgoutbox.' || quote_ident(chosen.name);
        DELETE FROM pgoutbox.retired AS r WHERE r.name = chosen.name;
    ELSE
        UPDATE pgoutbox.retired AS r SET cleared_id = last_id WHERE r.name = chosen.name;
    END IF;
    RETURN NEXT;
END
$function$
"""

MAKE_FIRST = """
DO $block$
BEGIN
    WHILE pgoutbox.make_partition(9223372036854775807) IS NOT NULL LOOP
    END LOOP;
END
$block$
"""

HAND_OVER_NOW = """
DO $block$
BEGIN
    PERFORM pgoutbox.hand_over();
END
$block$
"""

# A turn of maintenance locks upkeep before it reads the partitions. The opposite order would be a deadlock.
LOCK_MAINTENANCE = "LOCK TABLE pgoutbox.upkeep, pgoutbox.retired IN ACCESS EXCLUSIVE MODE"

# Back to one partition for all times. Retired tables that are not cleared yet are dropped: their messages are already
# deleted.
MERGE = """
DO $block$
DECLARE
    part text;
BEGIN
    FOR part IN SELECT p.name FROM pgoutbox.partitions() AS p WHERE p.name ~ '^message_done_[0-9]{8}$' LOOP
        EXECUTE 'ALTER TABLE pgoutbox.message_done DETACH PARTITION pgoutbox.' || quote_ident(part);
        EXECUTE 'INSERT INTO pgoutbox.message_done SELECT * FROM pgoutbox.' || quote_ident(part);
        EXECUTE 'DROP TABLE pgoutbox.' || quote_ident(part);
    END LOOP;
    FOR part IN SELECT r.name FROM pgoutbox.retired AS r LOOP
        EXECUTE 'DROP TABLE pgoutbox.' || quote_ident(part);
    END LOOP;
END
$block$
"""

COMMENTS = (
    ("TABLE pgoutbox.upkeep", "One row: the times of the last and the next turn of maintenance."),
    ("COLUMN pgoutbox.upkeep.due_at", "When the next turn may begin; the worker that changes it has the turn."),
    ("COLUMN pgoutbox.upkeep.began_at", "When the last turn began."),
    ("COLUMN pgoutbox.upkeep.is_single", "Always true: limits the table to one row."),
    ("COLUMN pgoutbox.upkeep.worker", "The worker that had the last turn."),
    (
        "TABLE pgoutbox.retired",
        (
            "Partitions that retention has detached from message_done; dropped when attempts, large payloads and keys "
            "of their messages are deleted."
        ),
    ),
    ("COLUMN pgoutbox.retired.retired_at", "When it was detached."),
    ("COLUMN pgoutbox.retired.cleared_id", "Attempts, large payloads and keys of messages up to this id are deleted."),
    ("COLUMN pgoutbox.retired.name", "Name of the table."),
    ("FUNCTION pgoutbox.partitions", "The partitions of message_done and their times, without the default one."),
    (
        "FUNCTION pgoutbox.kept_until",
        (
            "When retention rules stop keeping the messages that ended within this period; infinity if a message is "
            "never deleted, and minus infinity if there is none."
        ),
    ),
    (
        "FUNCTION pgoutbox.make_partition",
        (
            "Create the next partition of message_done, of a day or a week. Returns its name; null if those of the "
            "next seven days exist, or another session is creating one. Refused while the default partition is larger."
        ),
    ),
    (
        "FUNCTION pgoutbox.retire_partition",
        (
            "Detach a partition from message_done if no retention rule keeps any of its messages. Returns retired, "
            "kept, missing or busy."
        ),
    ),
    (
        "FUNCTION pgoutbox.clear_retired",
        (
            "Delete attempts, large payloads and dedupe keys of a batch of messages of a retired partition, and drop "
            "it after the last batch. No row if there is none, or another session is doing this."
        ),
    ),
)

DOWN = (
    LOCK_MAINTENANCE,
    MERGE,
    "DROP FUNCTION pgoutbox.clear_retired",
    "DROP FUNCTION pgoutbox.retire_partition",
    "DROP FUNCTION pgoutbox.make_partition",
    "DROP FUNCTION pgoutbox.kept_until",
    "DROP FUNCTION pgoutbox.partitions",
    "DROP TABLE pgoutbox.retired",
    "DROP TABLE pgoutbox.upkeep",
    SCHEMA_VERSION.format(version=1),
)


def upgrade() -> None:
    for statement in (
        SCHEMA_VERSION.format(version=2), UPKEEP, RETIRED, PARTITIONS, KEPT_UNTIL, MAKE_PARTITION, RETIRE_PARTITION,
        CLEAR_RETIRED,
    ):  # fmt: skip
        op.execute(statement)
    for function in ("partitions", "kept_until", "make_partition", "retire_partition", "clear_retired"):
        op.execute(f"REVOKE ALL ON FUNCTION pgoutbox.{function} FROM PUBLIC")
    for subject, comment in COMMENTS:
        op.execute(f"COMMENT ON {subject} IS '{comment}'")
    op.execute(MAKE_FIRST)
    op.execute(HAND_OVER_NOW)


def downgrade() -> None:
    for statement in DOWN:
        op.execute(statement)
