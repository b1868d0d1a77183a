"""The checks of PostgreSQL itself: what it is, who we are there, and what keeps it from its work."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator

import psycopg
from psycopg.rows import DictRow

from pgoutbox.database import sql
from pgoutbox.database.server import MIGRATE_HINT, MINIMUM_SERVER_VERSION, judge_schema
from pgoutbox.doctor.context import Patient, connected, run
from pgoutbox.doctor.findings import Note, counted, duration, listed, ok, one_line, problem, said, skipped, warning
from pgoutbox.errors import SchemaError

_POOLER_TRIALS = 3


def check_server(patient: Patient) -> Iterator[Note]:
    """Version, encoding, and whether it can be written."""
    facts = patient.ask_one(sql.EXAMINED_SERVER)
    found = list(_judged(facts))
    yield from found or [ok(f"PostgreSQL {facts['version_text']}, {facts['encoding']}, a primary")]


def _judged(facts: DictRow) -> Iterator[Note]:
    if facts["server_version"] < MINIMUM_SERVER_VERSION:
        yield problem(
            f"PostgreSQL {facts['version_text']} is too old", "workers refuse it", "upgrade to PostgreSQL 15 or newer"
        )
    if facts["encoding"] != "UTF8":
        yield problem(
            f"the database's encoding is {facts['encoding']}",
            "workers refuse it: text would come back as other text",
            "make a database with ENCODING 'UTF8', and move the tables there",
        )
    if facts["in_recovery"]:
        yield problem(
            "PGOUTBOX_DSN leads to a standby",
            "it cannot be written: nothing is enqueued, claimed or finished there",
            "give the primary's address, or several hosts with target_session_attrs=read-write",
        )
    elif facts["read_only"]:
        yield problem(
            "PGOUTBOX_DSN leads to a session that is read-only",
            "nothing is enqueued, claimed or finished there",
            "look for default_transaction_read_only in the server's, the database's and the role's settings",
        )


def check_schema(patient: Patient) -> Iterator[Note]:
    """Whether the tables are there, and not older than this package."""
    facts = patient.ask_one(sql.EXAMINED_SERVER)
    if not facts["has_schema"] or not facts["has_version"]:
        yield problem("the database has no schema pgoutbox", "there is nothing to enqueue into", MIGRATE_HINT)
        return
    if not facts["may_use_schema"]:
        yield problem(
            f"the role {facts['role']} may not use the schema pgoutbox",
            "it can neither enqueue nor work nor look",
            f"grant it the role of its part, say GRANT pgoutbox_worker TO {facts['role']}; see docs/how-to/roles.md",
        )
        return
    ((version,),) = (row.values() for row in patient.ask(sql.SCHEMA_VERSION))
    try:
        judge_schema(version)
    except SchemaError as error:
        yield problem(str(error), "workers and commands refuse it", MIGRATE_HINT)
        return
    if missing := [f"pgoutbox.{row['name']}" for row in patient.ask(sql.MISSING_RELATIONS)]:
        yield problem(
            f"{listed(missing, most=30)}: missing",
            "every statement that uses it fails, and `pgoutbox migrate` makes nothing that a revision made before",
            "restore it from a backup; or, if nothing is owed, run: pgoutbox migrate downgrade base; pgoutbox migrate",
        )
    else:
        yield ok(f"the schema has version {version}")


def check_rights(patient: Patient) -> Iterator[Note]:
    """What this role may do, and whether everybody may do something."""
    rights = patient.ask_one(sql.RIGHTS)
    user = patient.connection.info.user
    parts = [name for name in ("look", "enqueue", "work", "operate") if rights[f"may_{name}"]]
    if rights["is_superuser"]:
        yield warning(
            f"{user} is a superuser",
            "a mistake in the application, or a stolen password, costs the whole server",
            "use a role with the rights of its part alone; see docs/how-to/roles.md",
        )
    elif not parts:
        yield problem(
            f"{user} may neither enqueue nor work nor operate, nor look",
            "with this role nothing is enqueued and nothing delivered",
            f"grant it the role of its part, such as GRANT pgoutbox_worker TO {user}; see docs/how-to/roles.md",
        )
    else:
        member = f"; it has the rights of {listed(rights['granted_roles'])}" if rights["granted_roles"] else ""
        yield ok(f"{user} may {', '.join(parts)}{member}")
    yield from _public(rights)


def check_sequence(patient: Patient) -> Iterator[Note]:
    """Whether a newer message always has a greater id."""
    facts = patient.ask_one(sql.ID_SEQUENCE)
    why = "enqueue fails for keys whose newest message has a greater id, and other messages get ids out of order"
    found = []
    if facts["newest_id"] is not None and facts["last_id"] < facts["newest_id"]:
        found.append(
            problem(
                f"pgoutbox.message_id_seq is at {facts['last_id']}, and message {facts['newest_id']} exists",
                why,
                "a restore or a replica without the sequence leaves this; as the schema's owner, before anything is "
                "enqueued: SELECT setval('pgoutbox.message_id_seq', greatest((SELECT max(id) FROM pgoutbox.message), "
                "(SELECT max(newest_id) FROM pgoutbox.coalesce), (SELECT max(last_id) FROM pgoutbox.ordering)));",
            )
        )
    if facts["cache_size"] != 1:
        found.append(
            problem(
                f"pgoutbox.message_id_seq has CACHE {facts['cache_size']}: each session draws ids in advance",
                why,
                "as the schema's owner: ALTER SEQUENCE pgoutbox.message_id_seq CACHE 1; then have every producer "
                "connect again",
            )
        )
    yield from found or [ok(f"ids grow one by one, the last is {facts['last_id']}")]


def _public(rights: DictRow) -> Iterator[Note]:
    open_to_all = [f"table {name}" for name in rights["public_tables"]]
    open_to_all += [f"function {name}" for name in rights["public_functions"]]
    if rights["public_may_create"]:
        open_to_all.insert(0, "the schema, to create in it")
    if open_to_all:
        yield problem(
            f"PUBLIC has rights: {listed(open_to_all)}",
            "every role of the server can read or write messages, or slip something in",
            "REVOKE CREATE ON SCHEMA pgoutbox FROM PUBLIC; REVOKE ALL ON ALL TABLES IN SCHEMA pgoutbox FROM PUBLIC; "
            "REVOKE ALL ON ALL FUNCTIONS IN SCHEMA pgoutbox FROM PUBLIC;",
        )


def check_pooler(patient: Patient) -> Iterator[Note]:
    """Whether a transaction pooler stands between the worker, or its listener, and PostgreSQL."""
    settings, connection = patient.settings, patient.connection
    if not _is_pooled(connection):
        yield ok("no pooler stands in between")
    elif not settings.listen:
        yield ok("a pooler stands in between, and PGOUTBOX_LISTEN=false does without what it would lose")
    elif settings.listen_dsn is not None:
        yield ok("a pooler stands in between; the listener has a connection of its own")
    elif _shares_sessions(patient):
        yield problem(
            "a transaction pooler stands between the worker and PostgreSQL, and the listener has no way around it",
            "workers cannot listen there: they look once a second",
            "name a direct connection in PGOUTBOX_LISTEN_DSN, or set PGOUTBOX_LISTEN=false",
        )
    else:
        yield warning(
            "a pooler stands between the listener and PostgreSQL",
            "if it pools by transaction, workers cannot listen and look once a second",
            "unless it pools by session: name a direct connection in PGOUTBOX_LISTEN_DSN, or set PGOUTBOX_LISTEN=false",
        )


def _is_pooled(connection: psycopg.Connection[DictRow]) -> bool:
    """A pooler makes up the process number that it tells its clients."""
    return _backend_pid(connection) != connection.info.backend_pid


def _backend_pid(connection: psycopg.Connection[DictRow]) -> int:
    (row,) = run(connection, sql.BACKEND_PID)
    return int(row["pg_backend_pid"])


def _shares_sessions(patient: Patient) -> bool:
    """Whether two connections that are both open meet the same session, which a pool by session never lets happen."""
    with connected(patient.settings.require_dsn(), patient.settings) as other:
        mine: set[int] = set()
        its: set[int] = set()
        for _ in range(_POOLER_TRIALS):
            mine.add(_backend_pid(patient.connection))
            its.add(_backend_pid(other))
        return bool(mine & its) or len(mine) > 1 or len(its) > 1


def check_listener(patient: Patient) -> Iterator[Note]:
    """A notification from the one connection to the other, as an enqueue would ring a worker."""
    settings = patient.settings
    if not settings.listen:
        yield skipped("PGOUTBOX_LISTEN=false: workers poll")
        return
    if settings.listen_dsn is None and _is_pooled(patient.connection):
        yield skipped("behind a pooler this would prove nothing", "mend what `pooler` names")
        return
    name = "PGOUTBOX_DSN" if settings.listen_dsn is None else "PGOUTBOX_LISTEN_DSN"
    try:
        with connected(settings.require_listen_dsn(), settings) as listener:
            yield from _round_trip(patient, listener, name)
    except (psycopg.Error, OSError) as error:
        yield problem(
            f"{name}: the listener cannot connect or listen: {said(error)}",
            "every message waits for the sweep",
            f"check {name}: host, port, user and password",
        )


def _round_trip(patient: Patient, listener: psycopg.Connection[DictRow], name: str) -> Iterator[Note]:
    if _is_pooled(listener):
        yield problem(
            f"{name} leads through a pooler",
            "unless it pools by session, LISTEN is lost with each transaction",
            f"give {name} the server's own address",
        )
        return
    run(listener, sql.LISTEN)
    run(listener, sql.LISTEN_FOR_ITSELF)
    payload = secrets.token_hex(8)
    began = time.monotonic()
    run(patient.connection, sql.NOTIFY_ITSELF, {"payload": payload})
    deadline = began + patient.limits.round_trip_seconds
    while (left := deadline - time.monotonic()) > 0:
        for notify in listener.notifies(timeout=left, stop_after=1):
            if notify.payload == payload:
                yield ok(f"a notification came through in {(time.monotonic() - began) * 1000:.0f} ms")
                return
    yield problem(
        f"a notification did not come through in {patient.limits.round_trip_seconds:g} s",
        "every message waits for the sweep",
        "check that PGOUTBOX_DSN and PGOUTBOX_LISTEN_DSN lead to the same database of the same server",
    )


def check_clock(patient: Patient) -> Iterator[Note]:
    """The server's clock against this machine's."""
    before = patient.clock()
    there = patient.ask_one(sql.SERVER_CLOCK)["seconds"]
    after = patient.clock()
    ahead = max(there - after, before - there, 0.0)
    if ahead > patient.limits.clock_seconds:
        which = "ahead of" if there > after else "behind"
        yield warning(
            f"the server's clock is {duration(ahead)} {which} this machine's",
            "due times are the server's; signatures of webhooks, the dates of e-mails and the log are this machine's",
            "synchronise both by NTP",
        )
    else:
        yield ok("the clocks agree")


def check_durability(patient: Patient) -> Iterator[Note]:
    """Whether what was committed is still there after a crash."""
    facts = patient.ask_one(sql.DURABILITY)
    found = []
    for setting, is_on in (("fsync", facts["has_fsync"]), ("full_page_writes", facts["has_full_pages"])):
        if not is_on:
            found.append(
                problem(f"{setting}=off", "a crash of the machine can ruin the whole database", f"set {setting}=on")
            )
    if facts["unlogged"]:
        found.append(
            problem(
                f"UNLOGGED: {listed(facts['unlogged'])}",
                "a crash of the server empties these tables, and a standby has them empty",
                "; ".join(f"ALTER TABLE pgoutbox.{name} SET LOGGED" for name in facts["unlogged"]),
            )
        )
    hasty = facts["hasty"] or ([] if facts["commits_wait"] else ["this session"])
    if hasty:
        found.append(
            warning(
                f"synchronous_commit=off for {listed(hasty)}",
                "a crash loses the last commits that were acknowledged, with their messages; or sends some again",
                "set synchronous_commit=on for the roles of producers and workers",
            )
        )
    yield from found or [ok("commits are on disk when they are acknowledged")]


def check_transactions(patient: Patient) -> Iterator[Note]:
    """Who keeps dead rows from being vacuumed away."""
    limits = patient.limits
    found = patient.ask(sql.XMIN_HOLDERS, {"seconds": limits.transaction_seconds, "transactions": limits.transactions})
    for held in found:
        since = "" if held["age_seconds"] is None else f", open for {duration(held['age_seconds'])}"
        yield warning(
            f"{_KINDS[held['kind']]} {one_line(held['name'])} ({one_line(held['detail'])}){since} holds back vacuum by "
            f"{counted(held['transactions'], 'transaction')}",
            "dead rows pile up at the head of the queues: claims grow slower, tables and indexes larger",
            _RELEASES[held["kind"]].format(name=held["name"].replace("'", "''")),
        )
    if not patient.ask_one(sql.SEES_ALL_SESSIONS)["sees_all"]:
        yield skipped(
            f"{patient.connection.info.user} does not see the transactions of other roles",
            f"let it see them: GRANT pg_read_all_stats TO {patient.connection.info.user}",
        )
    elif not found:
        yield ok(f"no transaction is older than {duration(limits.transaction_seconds)}")


_KINDS = {
    "session": "session",
    "prepared": "prepared transaction",
    "slot": "replication slot",
    "standby": "standby",
}
_RELEASES = {
    "session": "commit it there, or end it: SELECT pg_terminate_backend({name}); "
    "idle_in_transaction_session_timeout keeps it from happening again",
    "prepared": "COMMIT PREPARED '{name}' or ROLLBACK PREPARED '{name}'",
    "slot": "if nobody uses it any more: SELECT pg_drop_replication_slot('{name}')",
    "standby": "end the long query there, or set hot_standby_feedback=off on it",
}


def check_slots(patient: Patient) -> Iterator[Note]:
    """Replication slots that fill the disk with WAL."""
    found = patient.ask(sql.SLOTS, {"bytes": patient.limits.retained_bytes})
    for slot in found:
        use = "in use" if slot["is_active"] else "unused"
        held = f"holds back {slot['bytes'] / (1 << 20):.0f} MiB of WAL" if slot["bytes"] is not None else "has lost WAL"
        yield warning(
            f"replication slot {slot['name']} ({use}, {slot['wal_status']}) {held}",
            "when the disk is full the server stops, and with it every commit",
            f"if nobody uses it any more: SELECT pg_drop_replication_slot('{slot['name']}'); "
            "max_slot_wal_keep_size sets a bound",
        )
    if not found:
        yield ok("no replication slot holds back much WAL")


def check_notify(patient: Patient) -> Iterator[Note]:
    """How full the server's queue of notifications is, and whether a stranger holds a bell."""
    usage = patient.ask_one(sql.NOTIFY_QUEUE_USAGE)["usage"]
    for holder in patient.ask(sql.FOREIGN_BELL_HOLDERS):
        yield warning(
            f"a session other than a worker's holds the bell of a queue: {holder['name']}",
            "workers poll instead of being woken"
            if holder["is_shared"]
            else "every enqueue in that queue notifies, which takes a lock of the whole server",
            "it may be a pooled session that a listener left behind; as its role or a superuser: "
            f"SELECT pg_terminate_backend({holder['pid']});",
        )
    if usage < patient.limits.notify_warning:
        yield ok(f"the queue of notifications is {usage:.1%} full")
        return
    say = problem if usage >= patient.limits.notify_problem else warning
    yield say(
        f"the queue of notifications is {usage:.1%} full",
        "when it is full, every transaction that notifies fails at its COMMIT, of any application",
        "look for a session that listens and has been in a transaction for long (see `transactions`), and end it",
    )


def check_vacuum(patient: Patient) -> Iterator[Note]:
    """Whether dead rows are cleaned up, and whether they are."""
    facts = patient.ask_one(sql.VACUUM)
    found = []
    if not facts["has_autovacuum"]:
        found.append(
            problem(
                "autovacuum is off, or track_counts is",
                "claims grow slower with every message, and one day the server refuses to write",
                "set autovacuum=on and track_counts=on",
            )
        )
    if facts["without_autovacuum"]:
        found.append(
            warning(
                f"autovacuum is off for {listed(facts['without_autovacuum'])}",
                "every claim and finish leaves dead rows, which nobody cleans up there",
                "; ".join(
                    f"ALTER TABLE pgoutbox.{name} RESET (autovacuum_enabled)" for name in facts["without_autovacuum"]
                ),
            )
        )
    for table in patient.ask(sql.DEAD_ROWS, {"dead_rows": patient.limits.dead_rows}):
        never = "; autovacuum has never been there" if table["never"] else ""
        found.append(
            warning(
                f"{table['name']} has {table['dead']} dead rows and {table['live']} live ones{never}",
                "claims read past them",
                f"see `transactions` for what holds vacuum back, then VACUUM pgoutbox.{table['name']}",
            )
        )
    yield from found or [ok("autovacuum keeps up with the tables")]
