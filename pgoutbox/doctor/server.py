"""The checks of PostgreSQL: version, role, schema, connections, vacuum and notifications."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator

import psycopg
from psycopg.rows import DictRow

from pgoutbox.database import sql
from pgoutbox.database.revisions import find_mismatch
from pgoutbox.database.server import (
    MIGRATE_HINT,
    MINIMUM_SERVER_VERSION,
    PACKAGE_VERSION,
    CopyError,
    OldPackageError,
    judge_schema,
    refusals,
)
from pgoutbox.doctor.context import DoctorContext, connected, run
from pgoutbox.doctor.findings import (
    HOW_TO,
    Finding,
    duration,
    error_text,
    join_names,
    ok,
    problem,
    skipped,
    warning,
)
from pgoutbox.errors import SchemaError
from pgoutbox.text import one_line, pluralize
from pgoutbox.transports.registry import is_configured

_POOLER_TRIALS = 3


def check_server(context: DoctorContext) -> Iterator[Finding]:
    """Check the version and the encoding, and that the session can write."""
    facts = context.ask_one(sql.EXAMINED_SERVER)
    if facts["server_version"] < MINIMUM_SERVER_VERSION:
        yield problem(
            "server-too-old",
            f"PostgreSQL {facts['version_text']} is too old",
            "workers refuse it",
            "upgrade to PostgreSQL 15 or newer",
        )
    if facts["encoding"] != "UTF8":
        yield problem(
            "encoding-not-utf8",
            f"the database's encoding is {facts['encoding']}",
            "workers refuse it, because text could change on its way",
            "create a database with ENCODING 'UTF8', and move the tables there",
        )
    if facts["in_recovery"]:
        yield problem(
            "standby",
            "PGOUTBOX_DSN leads to a standby",
            "a standby is read-only: messages cannot be enqueued, claimed or finished there",
            "set it to the address of the primary, or to several hosts with target_session_attrs=read-write",
        )
    elif facts["read_only"]:
        yield problem(
            "read-only-session",
            "PGOUTBOX_DSN leads to a read-only session",
            "messages cannot be enqueued, claimed or finished there",
            "unset default_transaction_read_only in the settings of the server, the database or the role",
        )
    yield ok("server-in-order", f"PostgreSQL {facts['version_text']}, {facts['encoding']}, a primary")


def check_schema(context: DoctorContext) -> Iterator[Finding]:
    """Check that the tables exist and are not older than this package."""
    facts = context.ask_one(sql.EXAMINED_SERVER)
    if not facts["has_schema"] or not facts["has_version"]:
        missing = ("schema-missing", "the database has no schema pgoutbox", MIGRATE_HINT)
        code, what, fix = context.read(find_mismatch) or missing
        yield problem(code, what, "messages cannot be enqueued", fix)
        return
    if not facts["may_use_schema"]:
        yield problem(
            "schema-forbidden",
            f"the role {facts['role']} may not use the schema pgoutbox",
            "it cannot enqueue, deliver or read messages",
            f"grant it a role, for example: GRANT pgoutbox_worker TO {facts['role']}; see {HOW_TO}/roles.html",
        )
        return
    try:
        with refusals():
            ((version,),) = (row.values() for row in context.ask(sql.SCHEMA_VERSION, {"package": PACKAGE_VERSION}))
        judge_schema(version)
    except OldPackageError as error:
        yield problem(
            "package-too-old", str(error), "workers and commands of it are refused", "pip install -U pgoutbox"
        )
        return
    except SchemaError as error:
        yield problem("schema-version-differs", str(error), "workers and commands refuse it", MIGRATE_HINT)
        return
    if relations := [f"pgoutbox.{row['name']}" for row in context.ask(sql.MISSING_RELATIONS)]:
        yield problem(
            "relation-missing",
            f"{join_names(relations, most=30)}: missing",
            "every statement that uses it fails, and `pgoutbox migrate` does not recreate it",
            "restore it from a backup; or, if no message is pending, run: "
            "pgoutbox migrate downgrade base; pgoutbox migrate",
        )
    elif mismatch := context.read(find_mismatch):
        code, what, fix = mismatch
        yield problem(code, what, "no migration works until this is fixed", fix)
    else:
        yield ok("schema-in-order", f"the schema has version {version}")


def check_rights(context: DoctorContext) -> Iterator[Finding]:
    """Check the rights of this role and of PUBLIC."""
    rights = context.ask_one(sql.RIGHTS)
    user = context.connection.info.user
    parts = [name for name in ("look", "enqueue", "work", "operate") if rights[f"may_{name}"]]
    if rights["is_superuser"]:
        yield warning(
            "superuser",
            f"{user} is a superuser",
            "a mistake in the application, or a stolen password, exposes the whole server",
            f"use a role with only the rights that it needs; see {HOW_TO}/roles.html",
        )
    elif not parts:
        yield problem(
            "no-rights",
            f"{user} may neither enqueue nor deliver nor operate nor read",
            "with this role, messages cannot be enqueued or delivered",
            f"grant it a role, for example: GRANT pgoutbox_worker TO {user}; see {HOW_TO}/roles.html",
        )
    else:
        member = f"; it has the rights of {join_names(rights['granted_roles'])}" if rights["granted_roles"] else ""
        yield ok("rights-in-order", f"{user} may {', '.join(parts)}{member}")
    open_to_all = [f"table {name}" for name in rights["public_tables"]]
    open_to_all += [f"function {name}" for name in rights["public_functions"]]
    if rights["public_may_create"]:
        open_to_all.insert(0, "CREATE in the schema")
    if open_to_all:
        yield problem(
            "public-rights",
            f"PUBLIC has rights: {join_names(open_to_all)}",
            "every role of the server can read or write messages, or create objects in the schema",
            "REVOKE CREATE ON SCHEMA pgoutbox FROM PUBLIC; REVOKE ALL ON ALL TABLES IN SCHEMA pgoutbox FROM PUBLIC; "
            "REVOKE ALL ON ALL FUNCTIONS IN SCHEMA pgoutbox FROM PUBLIC;",
        )


def check_copy(context: DoctorContext) -> Iterator[Finding]:
    """Check that the schema belongs to this database and this deployment."""
    deployment = context.settings.deployment
    try:
        with refusals():
            context.ask(sql.REQUIRE_HOME, {"deployment": deployment, "package": PACKAGE_VERSION})
    except CopyError as error:
        yield problem(
            "database-is-copy",
            error.problem,
            "workers send nothing from this database",
            "if this database replaces the original, or is for testing, run: pgoutbox adopt. "
            f"See {HOW_TO}/restore-clone-failover.html",
        )
        return
    home = context.ask_one(sql.HOME)
    if deployment is not None and home["deployment"] is None:
        yield warning(
            "deployment-unrecorded",
            f"PGOUTBOX_DEPLOYMENT={deployment} is not recorded in the schema",
            "workers do not compare it, so a copy of the server sends too",
            "when all workers have this setting, run: pgoutbox adopt",
        )
    elif home["deployment"] is None and _sends_mail(context, home):
        yield warning(
            "deployment-unnamed",
            "the deployment has no name",
            "workers in a clone of this server, or of a snapshot, send the same e-mails to the same people",
            "set PGOUTBOX_DEPLOYMENT=production for all workers, then run: pgoutbox adopt. "
            f"See {HOW_TO}/restore-clone-failover.html#name-the-deployment",
        )
    else:
        name = "" if home["deployment"] is None else f" and to deployment {home['deployment']}"
        yield ok("home-in-order", f"the schema belongs to this database{name}")


def _sends_mail(context: DoctorContext, home: DictRow) -> bool:
    if context.settings.mail.transport == "log":
        return False
    own = context.outbox is not None and "mailto" in context.outbox.transports
    return bool(own or is_configured("mailto", context.settings) or home["has_mail"])


def check_sequence(context: DoctorContext) -> Iterator[Finding]:
    """Check that a newer message always has a greater id."""
    facts = context.ask_one(sql.ID_SEQUENCE)
    why = "enqueue fails for keys whose newest message has a greater id, and other messages get ids out of order"
    if facts["newest_id"] is not None and facts["last_id"] < facts["newest_id"]:
        yield problem(
            "sequence-behind",
            f"pgoutbox.message_id_seq is at {facts['last_id']}, but message {facts['newest_id']} exists",
            why,
            "the cause is a restore or a replica without the sequence; as the schema's owner, before the next "
            "enqueue, run: "
            "SELECT setval('pgoutbox.message_id_seq', greatest((SELECT max(id) FROM pgoutbox.message), "
            "(SELECT max(newest_id) FROM pgoutbox.key_head)));",
        )
    if facts["cache_size"] != 1:
        yield problem(
            "sequence-cached",
            f"pgoutbox.message_id_seq has CACHE {facts['cache_size']}: each session reserves ids in advance",
            why,
            "as the schema's owner, run: ALTER SEQUENCE pgoutbox.message_id_seq CACHE 1; then reconnect every producer",
        )
    yield ok("sequence-in-order", f"the id sequence is in order, the last id is {facts['last_id']}")


def check_pooler(context: DoctorContext) -> Iterator[Finding]:
    """Check for a transaction pooler between the worker, or its listener, and PostgreSQL."""
    settings, connection = context.settings, context.connection
    if not _is_pooled(connection):
        yield ok("no-pooler", "direct connection, no pooler")
    elif not settings.listen:
        yield ok(
            "pooler-without-listener", "a pooler, and PGOUTBOX_LISTEN=false: workers poll and need no notifications"
        )
    elif settings.listen_dsn is not None:
        yield ok("pooler-bypassed", "a pooler, and the listener has its own connection")
    elif _shares_sessions(context):
        yield problem(
            "transaction-pooler",
            "a transaction pooler between the worker and PostgreSQL, and no direct connection for the listener",
            "workers cannot listen through it, so they poll once a second",
            "set PGOUTBOX_LISTEN_DSN to a direct connection, or set PGOUTBOX_LISTEN=false",
        )
    else:
        yield warning(
            "pooler",
            "a pooler between the listener and PostgreSQL",
            "if it pools by transaction, workers cannot listen and poll once a second",
            "unless it pools by session: set PGOUTBOX_LISTEN_DSN to a direct connection, or set PGOUTBOX_LISTEN=false",
        )


def _is_pooled(connection: psycopg.Connection[DictRow]) -> bool:
    """Return whether a pooler answers: it reports a process id that is not the backend's."""
    return _backend_pid(connection) != connection.info.backend_pid


def _backend_pid(connection: psycopg.Connection[DictRow]) -> int:
    (row,) = run(connection, sql.BACKEND_PID)
    return int(row["pg_backend_pid"])


def _shares_sessions(context: DoctorContext) -> bool:
    """Return whether two open connections use the same session, which session pooling never allows."""
    with connected(context.settings.require_dsn(), context.settings) as other:
        mine: set[int] = set()
        its: set[int] = set()
        for _ in range(_POOLER_TRIALS):
            mine.add(_backend_pid(context.connection))
            its.add(_backend_pid(other))
        return bool(mine & its) or len(mine) > 1 or len(its) > 1


def check_listener(context: DoctorContext) -> Iterator[Finding]:
    """Check that a notification arrives at the listener, as one from an enqueue would."""
    settings = context.settings
    if not settings.listen:
        yield skipped("listener-off", "PGOUTBOX_LISTEN=false: workers poll")
        return
    if settings.listen_dsn is None and _is_pooled(context.connection):
        yield skipped("listener-behind-pooler", "not checked behind a pooler", "fix the finding of `pooler` first")
        return
    name = "PGOUTBOX_DSN" if settings.listen_dsn is None else "PGOUTBOX_LISTEN_DSN"
    try:
        with connected(settings.require_listen_dsn(), settings) as listener:
            yield from _round_trip(context, listener, name)
    except (psycopg.Error, OSError) as error:
        yield problem(
            "listener-unreachable",
            f"{name}: the listener cannot connect or listen: {error_text(error)}",
            "every message waits for the next poll",
            f"check {name}: host, port, user and password",
        )


def _round_trip(context: DoctorContext, listener: psycopg.Connection[DictRow], name: str) -> Iterator[Finding]:
    if _is_pooled(listener):
        yield problem(
            "listener-through-pooler",
            f"{name} leads through a pooler",
            "unless it pools by session, LISTEN ends with each transaction",
            f"set {name} to the server's own address",
        )
        return
    run(listener, sql.LISTEN)
    run(listener, sql.LISTEN_FOR_ITSELF)
    payload = secrets.token_hex(8)
    began = time.monotonic()
    run(context.connection, sql.NOTIFY_ITSELF, {"payload": payload})
    deadline = began + context.limits.round_trip_seconds
    while (left := deadline - time.monotonic()) > 0:
        for notify in listener.notifies(timeout=left, stop_after=1):
            if notify.payload == payload:
                yield ok(
                    "notification-arrived", f"a notification arrived after {(time.monotonic() - began) * 1000:.0f} ms"
                )
                return
    yield problem(
        "notification-lost",
        f"a notification did not arrive within {context.limits.round_trip_seconds:g} s",
        "every message waits for the next poll",
        "check that PGOUTBOX_DSN and PGOUTBOX_LISTEN_DSN lead to the same database of the same server",
    )


def check_clock(context: DoctorContext) -> Iterator[Finding]:
    """Compare the server's clock with this machine's."""
    before = context.clock()
    there = context.ask_one(sql.SERVER_CLOCK)["seconds"]
    after = context.clock()
    ahead = max(there - after, before - there, 0.0)
    if ahead > context.limits.clock_seconds:
        which = "ahead of" if there > after else "behind"
        yield warning(
            "clock-differs",
            f"the server's clock is {duration(ahead)} {which} this machine's",
            "due times use the server's clock; webhook signatures, e-mail dates and the log use this machine's",
            "synchronise both with NTP",
        )
    else:
        yield ok("clock-in-order", "the clocks agree")


def check_durability(context: DoctorContext) -> Iterator[Finding]:
    """Check that committed messages survive a crash."""
    facts = context.ask_one(sql.DURABILITY)
    for setting in ("fsync", "full_page_writes"):
        if not facts[setting]:
            code = f"{setting.replace('_', '-')}-off"
            why = "a crash of the machine can corrupt the whole database"
            yield problem(code, f"{setting}=off", why, f"set {setting}=on")
    if facts["unlogged"]:
        yield problem(
            "unlogged-tables",
            f"UNLOGGED tables: {join_names(facts['unlogged'])}",
            "a crash of the server empties these tables, and they are empty on a standby",
            "; ".join(f"ALTER TABLE pgoutbox.{name} SET LOGGED" for name in facts["unlogged"]),
        )
    hasty = facts["hasty"] or ([] if facts["commits_wait"] else ["this session"])
    if hasty:
        yield warning(
            "asynchronous-commits",
            f"synchronous_commit=off for {join_names(hasty)}",
            "a crash loses the last commits with their messages, or messages are sent twice",
            "set synchronous_commit=on for the roles of producers and workers",
        )
    yield ok("durability-in-order", "commits are on disk before they are acknowledged")


def check_transactions(context: DoctorContext) -> Iterator[Finding]:
    """Find transactions and slots that stop vacuum from removing dead rows."""
    limits = context.limits
    limits_of_age = {"seconds": limits.transaction_seconds, "transactions": limits.transactions}
    for held in context.ask(sql.XMIN_HOLDERS, limits_of_age):
        kind, release = _HOLDERS[held["kind"]]
        since = "" if held["age_seconds"] is None else f", open for {duration(held['age_seconds'])}"
        yield warning(
            f"vacuum-held-by-{held['kind']}",
            f"{kind} {one_line(held['name'])} ({one_line(held['detail'])}){since} holds back vacuum by "
            f"{pluralize(held['transactions'], 'transaction')}",
            "dead rows accumulate at the head of the queues: claims become slower, tables and indexes grow",
            release.format(name=held["name"].replace("'", "''")),
        )
    if not context.ask_one(sql.SEES_ALL_SESSIONS)["sees_all"]:
        yield skipped(
            "sessions-invisible",
            f"{context.connection.info.user} cannot see the transactions of other roles",
            f"let it see them: GRANT pg_read_all_stats TO {context.connection.info.user}",
        )
    yield ok("no-old-transaction", f"no transaction is older than {duration(limits.transaction_seconds)}")


# Of each kind of holder: its name, and how to end it.
_HOLDERS = {
    "session": (
        "session",
        (
            "commit it there, or end it: SELECT pg_terminate_backend({name}); "
            "set idle_in_transaction_session_timeout to prevent it"
        ),
    ),
    "prepared-transaction": ("prepared transaction", "COMMIT PREPARED '{name}' or ROLLBACK PREPARED '{name}'"),
    "slot": ("replication slot", "if it is not needed: SELECT pg_drop_replication_slot('{name}')"),
    "standby": ("standby", "end the long query there, or set hot_standby_feedback=off on it"),
}


def check_slots(context: DoctorContext) -> Iterator[Finding]:
    """Find replication slots that fill the disk with WAL."""
    for slot in context.ask(sql.SLOTS, {"bytes": context.limits.retained_bytes}):
        use = "in use" if slot["is_active"] else "unused"
        held = f"holds back {slot['bytes'] / (1 << 20):.0f} MiB of WAL" if slot["bytes"] is not None else "has lost WAL"
        yield warning(
            "slot-retains-wal",
            f"replication slot {slot['name']} ({use}, {slot['wal_status']}) {held}",
            "when the disk is full, the server stops and no transaction commits",
            f"if it is not needed: SELECT pg_drop_replication_slot('{slot['name']}'); "
            "set max_slot_wal_keep_size to limit it",
        )
    yield ok("slots-in-order", "no replication slot holds back much WAL")


def check_notify(context: DoctorContext) -> Iterator[Finding]:
    """Check the fill level of the notification queue, and that only workers hold wake-up locks."""
    usage = context.ask_one(sql.NOTIFY_QUEUE_USAGE)["usage"]
    what = f"the notification queue is {usage:.1%} full"
    if usage < context.limits.notify_warning:
        yield ok("notify-in-order", what)
    else:
        report = problem if usage >= context.limits.notify_problem else warning
        yield report(
            "notify-queue-fills",
            what,
            "when it is full, every transaction that notifies fails at its COMMIT, in all applications",
            "find a session that listens and has been in a transaction for long (see `transactions`), and end it",
        )
    for holder in context.ask(sql.FOREIGN_LOCK_HOLDERS):
        yield warning(
            "foreign-wake-up-lock",
            f"a session that is not a worker holds the wake-up lock of a queue: {holder['name']}",
            "workers are not notified, so they poll"
            if holder["is_shared"]
            else "every enqueue in that queue sends a notification, which takes a lock of the whole server",
            "end the session, perhaps a pooled one that a listener left behind; as its role or a superuser: "
            f"SELECT pg_terminate_backend({holder['pid']});",
        )


def check_vacuum(context: DoctorContext) -> Iterator[Finding]:
    """Check that autovacuum is on, and that it keeps up."""
    facts = context.ask_one(sql.VACUUM)
    if not facts["has_autovacuum"]:
        yield problem(
            "autovacuum-off",
            "autovacuum is off, or track_counts is",
            "claims become slower with every message, and in the end the server refuses writes",
            "set autovacuum=on and track_counts=on",
        )
    if facts["without_autovacuum"]:
        yield warning(
            "autovacuum-off-for-table",
            f"autovacuum is off for {join_names(facts['without_autovacuum'])}",
            "every claim and finish leaves dead rows, which nothing removes there",
            "; ".join(
                f"ALTER TABLE pgoutbox.{name} RESET (autovacuum_enabled)" for name in facts["without_autovacuum"]
            ),
        )
    for table in context.ask(sql.DEAD_ROWS, {"dead_rows": context.limits.dead_rows}):
        never = "; autovacuum has never run on it" if table["never"] else ""
        yield warning(
            "dead-rows",
            f"{table['name']} has {table['dead']} dead rows and {table['live']} live ones{never}",
            "claims have to read past the dead rows",
            f"see `transactions` for transactions that hold back vacuum, then run: VACUUM pgoutbox.{table['name']}",
        )
    yield ok("vacuum-in-order", "autovacuum keeps up with the tables")
