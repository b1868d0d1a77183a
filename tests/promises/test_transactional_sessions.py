"""Sessions of transactional handlers: what a handler gets, what it may leave, and what happens if there are too few."""

from __future__ import annotations

import re
import signal
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import httpx
import pytest
from psycopg import connect
from psycopg import sql as composable
from psycopg.conninfo import conninfo_to_dict

from tests.support.outbox_actions import enqueue
from tests.support.pooler import pooled
from tests.support.roles import login
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import psycopg

    from tests.conftest import Connect, Server
    from tests.promises.conftest import StartWorker
    from tests.support.worker_process import WorkerProcess

# The topics of the handlers with the body of a test: a coroutine, and a function in a thread.
BOTH: Final = ("work", "work.sync")
# Handlers wait for these locks, which the test holds, as for something slow.
GATE: Final = 4_701
NEXT_GATE: Final = 4_702
OPEN_GATE: Final = 4_703


def application(body: str, *topics: str) -> str:
    """Return a module with a plain handler, and with transactional handlers of these topics.

    The body is written as for the event loop. Handlers of topics that end in `.sync` run it in a thread.
    """
    return f"""
import asyncio, sys, time
from pgoutbox import Context, Message, Outbox, RetryPolicy, SyncContext, Transient

outbox = Outbox()
{"".join(handler_text(topic, body) for topic in topics or ("work",))}
@outbox.handler("plain")
async def plain(message: Message, ctx: Context) -> None: ...
"""


def handler_text(topic: str, body: str) -> str:
    """Return the text of the transactional handler of one topic."""
    text = f"""
@outbox.handler("{topic}", transactional=True, retry=RetryPolicy(base=0.01, jitter=0))
async def work(message: Message, ctx: Context) -> None:
    run = ctx.connection.execute
{body}
"""
    if topic.endswith(".sync"):
        text = text.replace("async def", "def").replace("ctx: Context", "ctx: SyncContext")
        text = text.replace("await asyncio.sleep", "time.sleep").replace("await ", "")
    return text


def states(db: psycopg.Connection, topic: str = "work") -> Counter[str]:
    """Count the messages by state, of a topic and of those below it."""
    query = "SELECT state FROM pgoutbox.message WHERE topic = %s OR starts_with(topic, %s || '.')"
    return Counter(s for (s,) in db.execute(query, [topic, topic]).fetchall())


def failures(db: psycopg.Connection) -> dict[int, list[tuple[str, str | None]]]:
    """Return the outcome and the error of each recorded attempt of each message, except attempts that were sent."""
    query = (
        "SELECT message_id, outcome, error FROM pgoutbox.attempt_view WHERE outcome <> 'sent' ORDER BY attempt_count"
    )
    found: dict[int, list[tuple[str, str | None]]] = {}
    for message_id, outcome, error in db.execute(query).fetchall():
        found.setdefault(message_id, []).append((str(outcome), error))
    return found


def ends(db: psycopg.Connection) -> list[tuple[str, str | None]]:
    """Return the outcome and the error of each of these attempts."""
    return [end for attempts in failures(db).values() for end in attempts]


def used_up(db: psycopg.Connection) -> list[tuple[str, str | None]]:
    """Return the recorded attempts that used up budget without sending."""
    return [end for end in ends(db) if end[0] not in ("snoozed", "released")]


def until_over(db: psycopg.Connection, worker: WorkerProcess, topic: str = "work") -> None:
    """Wait until no message of the topic is pending or in flight."""
    wait_until(
        lambda: not states(db, topic).keys() & {"pending", "sending"},
        lambda: f"{states(db, topic)} {ends(db)[-5:]} {worker.log[-3000:]}",
    )


def advisory_locks(db: psycopg.Connection) -> Counter[tuple[int, bool]]:
    """Count the advisory locks of the test's database by key, and by whether they are granted."""
    query = (
        "SELECT l.objid::integer, l.granted FROM pg_locks AS l JOIN pg_database AS d ON d.oid = l.database"
        " WHERE l.locktype = 'advisory' AND d.datname = current_database()"
    )
    return Counter((key, granted) for key, granted in db.execute(query))


def ready_status(worker: WorkerProcess) -> int:
    """Ask the worker whether it is ready."""
    served = wait_until(lambda: worker.records("metrics_served"), lambda: worker.log)
    return httpx.get(f"http://{served[0]['address']}/readyz", timeout=60).status_code


@contextmanager
def gate(db: psycopg.Connection, key: int = GATE) -> Iterator[None]:
    """Keep the handlers waiting that pass the gate."""
    db.execute("SELECT pg_advisory_lock(%s)", [key])
    try:
        yield
    finally:
        db.execute("SELECT pg_advisory_unlock(%s)", [key])


@contextmanager
def enqueued_and_waiting(db: psycopg.Connection, dsn: str, *, at_least: str) -> Iterator[None]:
    """Enqueue a message while no new session of a worker gets ready. Wait until one has waited for this time."""
    waits = (
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
        " AND application_name = 'pgoutbox handler' AND age(clock_timestamp(), query_start) > %s::interval"
    )
    with connect(dsn) as blocker:
        blocker.execute("LOCK TABLE pgoutbox.home")
        enqueue(db, "work", max_attempts=1)
        wait_until(lambda: db.execute(waits, [at_least]).fetchone() == (1,), lambda: "no session waits")
        yield
        blocker.rollback()


WRITE: Final = '    await run("INSERT INTO effect VALUES (%s)", [message.id])\n'
PASS_GATE: Final = f'    await run("SELECT pg_advisory_xact_lock_shared({GATE})")\n'


@pytest.fixture
def effects(db: psycopg.Connection) -> Callable[[], list[int]]:
    """Create a table for the handlers' writes, and return a function that reads its message ids."""
    db.execute("CREATE TABLE effect (message_id bigint); GRANT INSERT ON effect TO PUBLIC")
    return lambda: [row[0] for row in db.execute("SELECT message_id FROM effect ORDER BY 1").fetchall()]


def test_services_behind_a_pooler_that_nobody_named_book_only_their_own_messages(
    start_worker: StartWorker, server: Server, dsn: str, db: psycopg.Connection
) -> None:
    db.execute("CREATE TABLE ledger (kind text, id bigint)")
    with pooled(dsn, server, mode="transaction", size=5) as pooled_dsn:
        workers = []
        for side in ("credit", "debit.sync"):
            body = f"""    await run("INSERT INTO ledger VALUES ('{side}', %s)", [message.id])\n"""
            text = application(body, side).replace('"plain"', f'"plain.{side}"')
            workers.append(start_worker(text, dsn=pooled_dsn, concurrency="10", lease_seconds="60"))
        ids: dict[str, list[int]] = {"credit": [], "debit.sync": []}
        for _ in range(10):
            with db.transaction():
                for side in ids:
                    ids[side] += [enqueue(db, side, max_attempts=1) for _ in range(40)]
        for side, worker in zip(ids, workers, strict=True):
            until_over(db, worker, side)
    booked: dict[str, list[int]] = dict(db.execute("SELECT kind, array_agg(id ORDER BY id) FROM ledger GROUP BY 1"))
    assert {side: booked.get(side) == sorted(ids[side]) for side in ids} == dict.fromkeys(ids, True)
    assert used_up(db) == []


@pytest.mark.parametrize("limit", ["of the role", "of a pooler", "of a pooler with a direct listener"])
def test_too_few_connections_use_up_no_attempt_and_delay_no_other_work(
    start_worker: StartWorker,
    server: Server,
    dsn: str,
    db: psycopg.Connection,
    effects: Callable[[], list[int]],
    limit: str,
) -> None:
    text = application(WRITE + PASS_GATE, *BOTH)

    def start(worker_dsn: str, **settings: str) -> WorkerProcess:
        settings |= {"dsn": worker_dsn, "concurrency": "16", "lease_seconds": "3", "connect_timeout_seconds": "1"}
        return start_worker(text, environment=None, metrics_address="127.0.0.1:0", **settings)

    def check(worker: WorkerProcess) -> None:
        ids = [enqueue(db, topic, max_attempts=1) for _ in range(12) for topic in BOTH]
        with gate(db):
            # The shortage shows: some handlers run, and some messages were put back, or have failed.
            wait_until(lambda: running() and (states(db)["failed"] or ends(db)), lambda: worker.log)
            for _ in range(5):
                enqueue(db, "plain")
                until_over(db, worker, "plain")
                assert ready_status(worker) == 200
            held = leases(db)
            wait_until(lambda: min(leases(db)) > max(held), lambda: worker.log)  # They are renewed.
            assert ready_status(worker) == 200
        until_over(db, worker)
        assert used_up(db) == []
        assert states(db) == {"sent": 24}
        assert effects() == ids
        assert worker.records("handler_raised") == []

    def running() -> bool:
        return (GATE, False) in advisory_locks(db)

    if limit == "of the role":
        with login(dsn, "pgoutbox_worker", options="CONNECTION LIMIT 9") as limited_dsn:
            worker = start(limited_dsn)
            check(worker)
            assert worker.stop() == 0
        return
    with pooled(dsn, server, mode="transaction", size=4) as pooled_dsn:
        worker = start(pooled_dsn, listen_dsn=dsn) if "listener" in limit else start(pooled_dsn)
        check(worker)
        assert worker.stop() == 0


def leases(db: psycopg.Connection) -> list[float]:
    """Return when the leases of messages in flight end."""
    query = (
        "SELECT extract(epoch FROM lease_expires_at) FROM pgoutbox.in_flight_view AS v"
        " JOIN pgoutbox.message AS m USING (id) WHERE m.topic LIKE 'work%'"
    )
    return [float(at) for (at,) in db.execute(query).fetchall()] or [0.0]


@pytest.mark.parametrize("place", ["direct", "behind a pooler"])
def test_time_limits_of_the_role_do_not_end_a_transactional_handler(
    start_worker: StartWorker,
    server: Server,
    dsn: str,
    db: psycopg.Connection,
    effects: Callable[[], list[int]],
    place: str,
) -> None:
    limits = ["idle_in_transaction_session_timeout", "statement_timeout", "lock_timeout"]
    if db.info.server_version >= 170000:
        limits.append("transaction_timeout")
    wait = '    await asyncio.sleep(0.6)\n    await run("SELECT pg_sleep(0.6)")\n'
    text = application(WRITE + wait + PASS_GATE, *BOTH)
    database = composable.Identifier(db.info.dbname)
    for name in limits:
        db.execute(composable.SQL("ALTER DATABASE {} SET {} = '300ms'").format(database, composable.Identifier(name)))
    with pooled(dsn, server, mode="transaction", size=5) as pooled_dsn:
        worker = start_worker(text, dsn=dsn if place == "direct" else pooled_dsn, lease_seconds="60")
        with gate(db):
            ids = [enqueue(db, topic, max_attempts=1) for topic in BOTH]
            waits = (
                "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
                " AND wait_event = 'advisory' AND age(clock_timestamp(), query_start) > '0.6s'"
            )
            wait_until(lambda: db.execute(waits).fetchone() == (2,) or used_up(db), lambda: worker.log)
        until_over(db, worker)
    assert used_up(db) == []
    assert effects() == ids


def test_a_handler_that_ends_its_transaction_or_resets_its_settings_learns_why_it_is_not_sent(
    start_worker: StartWorker, db: psycopg.Connection, effects: Callable[[], list[int]]
) -> None:
    body = WRITE + '    await run(message.payload)\n    await run("SELECT 1")\n'
    worker = start_worker(application(body, *BOTH))
    reasons = dict.fromkeys(
        ("COMMIT AND CHAIN", "ROLLBACK AND CHAIN", "COMMIT; BEGIN", "COMMIT"), "ended its transaction"
    ) | {"RESET ALL": "RESET ALL"}
    hows = {enqueue(db, topic, how, max_attempts=1): how for how in reasons for topic in BOTH}
    until_over(db, worker)
    assert states(db) == {"failed": len(hows)}
    told = failures(db)
    assert [(one, told[one]) for one, how in hows.items() if not _is_told(told[one], reasons[how])] == []
    assert effects() == [message_id for message_id, how in hows.items() if how.startswith("COMMIT")]
    wait_until(lambda: len(worker.records("failed")) == len(hows), lambda: worker.log)
    assert [
        str(one) for one in worker.records("failed") if not any(reason in str(one) for reason in reasons.values())
    ] == []


def _is_told(attempts: list[tuple[str, str | None]], reason: str) -> bool:
    ((outcome, error),) = attempts
    return outcome == "failed" and reason in (error or "")


def test_a_worker_that_is_suspended_past_its_lease_commits_none_of_its_handlers_writes(
    start_worker: StartWorker, db: psycopg.Connection, effects: Callable[[], list[int]]
) -> None:
    """It goes on during the next attempts of some messages and after those of others. Of each kind, one message is
    deleted at once when it is sent. The handlers give their sessions another name, so the next attempts do not end
    them."""
    body = f"""
{WRITE}
    await run("SET application_name TO 'its own'")
    await run("SELECT pg_advisory_xact_lock_shared(%s)", [{GATE} if message.attempt_count == 1 else message.payload])
"""
    topics = ("work", "work.deleted")
    db.execute("SELECT pgoutbox.set_retention('work.deleted', 'sent', '0')")
    suspended = start_worker(application(body, *topics))
    with gate(db, NEXT_GATE):
        with gate(db):
            after, during = ([enqueue(db, topic, key) for topic in topics] for key in (OPEN_GATE, NEXT_GATE))
            wait_until(lambda: advisory_locks(db)[GATE, False] == 4, lambda: suspended.log)
            suspended.send_signal(signal.SIGSTOP)
            other = start_worker(application(body, *topics))
            wait_until(
                lambda: advisory_locks(db)[NEXT_GATE, False] == 2 and len(effects()) == 2 and states(db)["sent"] == 1,
                lambda: other.log,
            )
            before = states(db), effects()
            assert before == ({"sent": 1, "sending": 2}, after)
        suspended.send_signal(signal.SIGCONT)
        wait_until(
            lambda: len(suspended.records("lease_lost")) == 4 or (states(db), effects()) != before,
            lambda: suspended.log,
        )
        assert (states(db), effects()) == before
    until_over(db, other)
    assert effects() == after + during


def test_a_locked_message_is_completed_later_although_its_handler_has_set_a_lock_timeout(
    start_worker: StartWorker, connect: Connect, db: psycopg.Connection, effects: Callable[[], list[int]]
) -> None:
    holder = connect()
    worker = start_worker(application(WRITE + PASS_GATE + "    await run(\"SET lock_timeout TO '10ms'\")\n"))
    with gate(db):
        message_id = enqueue(db, "work", max_attempts=1)
        wait_until(lambda: (GATE, False) in advisory_locks(db), lambda: worker.log)
        holder.execute("SELECT FROM pgoutbox.message_live WHERE id = %s FOR UPDATE", [message_id])
    waits = (
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
        " AND wait_event = 'transactionid' AND age(clock_timestamp(), query_start) > '0.1s'"
    )
    wait_until(lambda: db.execute(waits).fetchone() == (1,) or worker.records("handler_raised"), lambda: worker.log)
    holder.rollback()
    until_over(db, worker)
    assert ends(db) == []
    assert effects() == [message_id]


def test_a_handler_that_works_as_another_role_is_completed_by_the_worker(
    start_worker: StartWorker, dsn: str, db: psycopg.Connection, effects: Callable[[], list[int]]
) -> None:
    with login(dsn) as tenant_dsn, login(dsn, "pgoutbox_worker") as worker_dsn:
        tenant, own = (str(conninfo_to_dict(one)["user"]) for one in (tenant_dsn, worker_dsn))
        db.execute(composable.SQL("GRANT {} TO {}").format(composable.Identifier(tenant), composable.Identifier(own)))
        db.execute("CREATE TABLE seen (role text); GRANT INSERT ON seen TO PUBLIC")
        body = f"""
    await run("INSERT INTO seen SELECT current_user")
    await run(message.payload + " {tenant}")
    await run("INSERT INTO effect VALUES (%s)", [message.id])
"""
        worker = start_worker(application(body, *BOTH), dsn=worker_dsn, concurrency="1")
        hows = ("SET LOCAL ROLE", "SET ROLE")
        ids = [enqueue(db, topic, how, max_attempts=1) for how in hows for topic in BOTH for _ in range(3)]
        until_over(db, worker)
        assert used_up(db) == []
        assert effects() == ids
        assert db.execute("SELECT role FROM seen").fetchall() == [(own,)] * len(ids)
        assert worker.stop() == 0


LEAVE: Final = """
    await run("SELECT pg_advisory_lock(77)")
    await run("CREATE TEMP TABLE left_over ()")
    await run("PREPARE left_over AS SELECT 1")
    await run("DECLARE left_over CURSOR WITH HOLD FOR SELECT 1")
    await run("LISTEN left_over")
    await run("SET statement_timeout = '54s'")
    await run("SELECT nextval('numbers')")
    ctx.connection.row_factory = None
"""
LOOK: Final = """
    cursor = await run(
        "SELECT current_setting('statement_timeout') || (SELECT count(*) FROM pg_listening_channels())"
        " || (SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid())"
    )
    await run("INSERT INTO seen VALUES (%s, pg_backend_pid())", [(await cursor.fetchone())[0]])
    await run(NO_LAST_VALUE)
"""
# Fails if the session knows the last value of a sequence.
NO_LAST_VALUE: Final = """
DO $$ BEGIN
    PERFORM lastval();
    RAISE 'it knows the last value of a sequence';
EXCEPTION WHEN object_not_in_prerequisite_state THEN NULL;
END $$
"""


@pytest.mark.parametrize("place", ["direct", "behind a pooler"])
def test_nothing_that_a_handler_leaves_in_its_session_outlives_it(
    start_worker: StartWorker,
    server: Server,
    dsn: str,
    db: psycopg.Connection,
    place: str,
) -> None:
    db.execute("CREATE TABLE seen (what text, session integer)")
    db.execute("CREATE SEQUENCE numbers")
    body = (
        LOOK + LEAVE + '    if message.payload == "raises" and message.attempt_count == 1: raise ValueError("once")\n'
    )
    if place == "behind a pooler":  # Prepared statements are the pooler's.
        body = "".join(line for line in body.splitlines(keepends=True) if "PREPARE" not in line)
    text = application(body, *BOTH) + f"\nNO_LAST_VALUE = {NO_LAST_VALUE!r}\n"
    with pooled(dsn, server, mode="transaction", size=3) as pooled_dsn:
        worker = start_worker(text, dsn=dsn if place == "direct" else pooled_dsn, concurrency="1")
        ids = [
            enqueue(db, topic, end, max_attempts=2) for end in ("is sent", "raises") for topic in BOTH for _ in range(3)
        ]
        until_over(db, worker)
        assert [error for _, error in used_up(db) if "once" not in (error or "")] == []
        assert states(db) == {"sent": len(ids)}
        assert db.execute("SELECT what FROM seen").fetchall() == [("000",)] * len(ids)
        # Otherwise it would prove nothing.
        if place == "direct":
            assert db.execute("SELECT count(DISTINCT session) FROM seen").fetchone() == (1,)
        wait_until(lambda: (77, True) not in advisory_locks(db), lambda: "an advisory lock is left")


@pytest.mark.parametrize("last", ["INSERT INTO taken VALUES (1)", "COMMIT; BEGIN"], ids=["commit", "completion"])
def test_a_refusal_at_the_end_does_not_cost_the_session(
    start_worker: StartWorker, db: psycopg.Connection, last: str
) -> None:
    db.execute("CREATE TABLE taken (n int UNIQUE DEFERRABLE INITIALLY DEFERRED); INSERT INTO taken VALUES (1)")
    db.execute("GRANT INSERT, SELECT ON taken TO PUBLIC")
    body = (
        '    ((pid,),) = await (await run("SELECT pg_backend_pid()")).fetchall()\n'
        '    print(f"session {pid}", file=sys.stderr, flush=True)\n'
        f'    await run("{last}")\n'
    )
    worker = start_worker(application(body))
    enqueue(db, "work", max_attempts=4)
    until_over(db, worker)
    assert [outcome for outcome, _ in ends(db)] == ["retry", "retry", "retry", "failed"]
    sessions = re.findall(r"session ([0-9]+)", worker.log)
    assert (len(sessions), len(set(sessions))) == (4, 1)


def test_a_refused_commit_leaves_no_lock_behind_a_pooler(
    start_worker: StartWorker, server: Server, dsn: str, db: psycopg.Connection
) -> None:
    db.execute("CREATE TABLE taken (number integer UNIQUE DEFERRABLE INITIALLY DEFERRED)")
    db.execute("INSERT INTO taken VALUES (1)")
    body = "    await run('SELECT pg_advisory_lock(77)')\n    await run('INSERT INTO taken VALUES (1)')\n"
    with pooled(dsn, server, mode="transaction", size=4) as pooled_dsn:
        worker = start_worker(application(body), dsn=pooled_dsn, concurrency="1")
        enqueue(db, "work", max_attempts=1)
        until_over(db, worker)
        assert states(db) == {"failed": 1}
        assert (77, True) not in advisory_locks(db), worker.log


def test_no_setting_of_a_handler_makes_a_completion_read_the_whole_table(
    start_worker: StartWorker, db: psycopg.Connection
) -> None:
    """The completion's plan outlives the handler in whose transaction it was made."""
    body = """
    if message.payload:
        await run("SET LOCAL enable_indexscan = off")
        await run("SET LOCAL enable_bitmapscan = off")
"""

    def scans_while_delivering(topic: str) -> int:
        """Deliver twenty messages, half of which change the settings, and count the scans of the whole table."""
        began_at = scan_count()
        for number in range(20):
            enqueue(db, topic, number < 10)
        db.execute("VACUUM (ANALYZE) pgoutbox.message_live")  # One page, which a plan would rather read whole.
        worker = start_worker(application(body), "--drain", concurrency="1")
        assert worker.wait() == 0, worker.log
        assert states(db, topic) == {"sent": 20}
        return scan_count() - began_at

    def scan_count() -> int:
        db.execute("SELECT pg_stat_force_next_flush()")
        query = "SELECT seq_scan FROM pg_stat_user_tables WHERE relid = 'pgoutbox.message_live'::regclass"
        ((count,),) = db.execute(query).fetchall()
        return int(count)

    assert scans_while_delivering("work") == scans_while_delivering("plain")


def test_a_handler_does_not_run_on_a_new_session_to_a_database_of_another_deployment(
    start_worker: StartWorker, db: psycopg.Connection, effects: Callable[[], list[int]]
) -> None:
    """The sessions of the worker itself are older than the adoption, so it still claims."""
    worker = start_worker(application(WRITE, *BOTH))
    enqueue(db, "plain")
    until_over(db, worker, "plain")
    db.execute("SELECT pgoutbox.adopt('staging')")
    ids = {enqueue(db, topic) for topic in BOTH}
    wait_until(lambda: states(db)["sent"] or failures(db).keys() == ids, lambda: worker.log)
    assert effects() == []
    assert used_up(db) == []


def test_every_slot_gets_a_session_once_handlers_are_slow(
    start_worker: StartWorker, db: psycopg.Connection, effects: Callable[[], list[int]]
) -> None:
    """Quick handlers share a few sessions. Others that wait for something need their own."""
    body = f"{WRITE}    if message.payload:\n    {PASS_GATE}"
    enqueue_all = "SELECT pgoutbox.enqueue('work', to_jsonb(n > 1000)) FROM generate_series(1, 1030) AS n"
    with gate(db):
        db.execute(enqueue_all)
        worker = start_worker(application(body), concurrency="30")
        wait_until(lambda: advisory_locks(db)[GATE, False] == 30, lambda: f"{advisory_locks(db)} {worker.log[-3000:]}")
    until_over(db, worker)
    assert len(effects()) == 1030
    assert ends(db) == []  # No attempt was put back for want of a session.
    assert worker.records("handlers_limited") == []


def test_the_timeout_of_a_handler_holds_after_a_longer_wait_for_a_session(
    start_worker: StartWorker, dsn: str, db: psycopg.Connection, effects: Callable[[], list[int]]
) -> None:
    text = application(WRITE + "    await asyncio.Event().wait()\n")
    worker = start_worker(text.replace("transactional=True", "transactional=True, timeout=1"), lease_seconds="60")
    enqueue(db, "plain")
    until_over(db, worker, "plain")
    with enqueued_and_waiting(db, dsn, at_least="1.2s"):
        pass
    until_over(db, worker)
    assert ["timed out" in (error or "") for _, error in used_up(db)] == [True], ends(db)
    assert effects() == []


def test_a_handler_gets_the_notices_of_its_statements(start_worker: StartWorker, db: psycopg.Connection) -> None:
    db.execute("CREATE TABLE seen (what text)")
    body = """
    notices = []
    ctx.connection.add_notice_handler(lambda notice: notices.append(notice.message_primary))
    await run("DO $$ BEGIN RAISE NOTICE 'hello'; END $$")
    await run("INSERT INTO seen SELECT unnest(%s::text[])", [notices])
"""
    worker = start_worker(application(body, *BOTH), concurrency="1")
    for topic in BOTH * 2:
        enqueue(db, topic, max_attempts=1)
    until_over(db, worker)
    assert used_up(db) == []
    assert db.execute("SELECT what FROM seen").fetchall() == [("hello",)] * 4


@pytest.mark.parametrize("place", ["direct", "behind a pooler"])
def test_every_handler_has_the_settings_and_the_login_of_its_client(
    start_worker: StartWorker, server: Server, dsn: str, db: psycopg.Connection, place: str
) -> None:
    db.execute("CREATE TABLE seen (what text)")
    body = """
    await run(SEE, [USER])
    await run("SET SESSION AUTHORIZATION pgoutbox_worker")
    await run("SET TimeZone TO 'Asia/Tokyo'")
    if message.payload == "commits": await run("COMMIT")
"""
    see = (
        "INSERT INTO seen SELECT concat_ws(', ', current_setting('TimeZone'), current_setting('DateStyle'),"
        " current_setting('client_encoding'), session_user = %s)"
    )
    text = application(body) + f"\nUSER = {db.info.user!r}\nSEE = {see!r}\n"
    client = {"PGTZ": "Europe/Vienna", "PGDATESTYLE": "German, DMY"}
    with pooled(dsn, server, mode="transaction", size=3) as pooled_dsn:
        worker = start_worker(text, dsn=dsn if place == "direct" else pooled_dsn, concurrency="1", environment=client)
        # Behind a pooler, a statement after COMMIT may run in a session of another client.
        payloads = [None, "commits" if place == "direct" else None, None, None]
        for payload in payloads:
            enqueue(db, "work", payload, max_attempts=1)
        until_over(db, worker)
        assert ["ended its transaction" in (error or "") for _, error in used_up(db)] == [True] * (place == "direct")
        seen = db.execute("SELECT what FROM seen").fetchall()
        assert seen == [("Europe/Vienna, German, DMY, UTF8, t",)] * 4


def test_a_session_that_is_told_to_be_pooled_is_cleaned_within_a_transaction(
    start_worker: StartWorker, db: psycopg.Connection, effects: Callable[[], list[int]]
) -> None:
    """The pooler gives its clients the real process numbers, so nothing else tells of it."""
    worker = start_worker(application(WRITE), concurrency="1", listen="false")
    message_id = enqueue(db, "work", max_attempts=1)
    until_over(db, worker)
    assert effects() == [message_id]
    last = (
        "SELECT query FROM pg_stat_activity WHERE datname = current_database()"
        " AND application_name = 'pgoutbox handler' AND state = 'idle' AND query LIKE '%DISCARD%'"
    )
    ((query,),) = wait_until(lambda: db.execute(last).fetchall(), lambda: worker.log)
    assert query.rstrip().endswith("COMMIT")


def test_a_middleware_may_give_up_before_a_transactional_handler_begins(
    start_worker: StartWorker, dsn: str, db: psycopg.Connection, effects: Callable[[], list[int]]
) -> None:
    """Its timeout ends the wait of its attempt, but not what the worker itself reads meanwhile."""
    text = (
        application(WRITE)
        + """
import sys
from pgoutbox import Permanent

@outbox.middleware
async def limit(messages, call_next):
    try:
        async with asyncio.timeout(0.3):
            return await call_next()
    except TimeoutError:
        print("GAVE UP", file=sys.stderr, flush=True)
        return [Permanent("gave up")]
"""
    )
    readers = (
        "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
        " AND query LIKE '%pgoutbox.retention%'"
    )
    with connect(dsn) as blocker:
        blocker.execute("LOCK TABLE pgoutbox.retention")
        worker = start_worker(text, lease_seconds="60")
        enqueue(db, "work")
        before = wait_until(lambda: db.execute(readers).fetchall(), lambda: worker.log)
        wait_until(lambda: "GAVE UP" in worker.log or ends(db), lambda: worker.log)
        assert db.execute(readers).fetchall() == before
        blocker.rollback()
    until_over(db, worker)
    assert [error for _, error in ends(db)] == ["gave up"]
    assert effects() == []


def test_a_stop_before_a_transactional_handler_begins_uses_up_no_attempt(
    start_worker: StartWorker, dsn: str, db: psycopg.Connection, effects: Callable[[], list[int]]
) -> None:
    text = application(WRITE).replace("transactional=True", 'transactional=True, on_unknown="hold"')
    worker = start_worker(text, lease_seconds="60", shutdown_grace_seconds="0")
    enqueue(db, "plain")
    until_over(db, worker, "plain")
    with enqueued_and_waiting(db, dsn, at_least="0s"):
        assert worker.stop() == 0
    assert states(db) == {"pending": 1}
    assert used_up(db) == []
    assert effects() == []
