"""Several messages in one transaction: those that are sent commit together, and one that is not leaves nothing."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from datetime import timedelta
from typing import TYPE_CHECKING, Final, cast

import pytest
from psycopg.errors import DivisionByZero

from pgoutbox import (
    ConfigurationError,
    Context,
    Message,
    Outbox,
    Outcome,
    Permanent,
    RetryPolicy,
    Skip,
    Snooze,
    SyncContext,
    Transient,
    Worker,
)
from pgoutbox.operations import Operator
from tests.support.outbox_actions import (
    attempts_of,
    cancel,
    enqueue,
    lapse,
    reports,
    rows_of,
    running,
    settings_for,
)
from tests.support.waiting import until, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import psycopg

    from tests.promises.conftest import StartWorker

LATER: Final = RetryPolicy.steps(3600, jitter=0)
WRITE: Final = "INSERT INTO effect (message_id) VALUES (%s)"
FORMS: Final = pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])
KINDS: Final = pytest.mark.parametrize("is_batch", [False, True], ids=["savepoints", "batch"])


@pytest.fixture
def effects(db: psycopg.Connection) -> Callable[[], list[int]]:
    """Create a table for the handlers' writes, and return a function that reads its message ids."""
    db.execute("CREATE TABLE effect (message_id bigint, transaction_id xid8 DEFAULT pg_current_xact_id())")
    return lambda: [row[0] for row in db.execute("SELECT message_id FROM effect ORDER BY 1").fetchall()]


@pytest.fixture
def outbox(dsn: str) -> Outbox:
    return Outbox(settings_for(dsn, concurrency=8))


def nothing(message: Message, run: Callable[[str], object]) -> Outcome | None:
    """Send the message."""


def register(
    outbox: Outbox,
    then: Callable[[Message, Callable[[str], object]], Outcome | None] = nothing,
    *,
    is_async: bool = False,
    is_batch: bool = False,
) -> list[list[int]]:
    """Register a handler that writes the id of each message and then calls `then` with it. Return the ids of each call.

    In a thread, `then` can run statements.
    """
    calls: list[list[int]] = []

    def refuse(statement: str) -> object:
        raise AssertionError(f"only a handler in a thread can run: {statement}")

    async def handle_all(messages: Sequence[Message], contexts: Sequence[Context]) -> Sequence[Outcome | None]:
        calls.append([message.id for message in messages])
        for message in messages:
            await contexts[0].connection.execute(WRITE, [message.id])
        return [then(message, refuse) for message in messages]

    def handle_all_in_thread(messages: Sequence[Message], contexts: Sequence[SyncContext]) -> Sequence[Outcome | None]:
        calls.append([message.id for message in messages])
        connection = contexts[0].connection
        for message in messages:
            connection.execute(WRITE, [message.id])
        return [then(message, lambda statement: connection.execute(statement.encode())) for message in messages]

    async def handle(message: Message, ctx: Context) -> Outcome | None:
        return (await handle_all([message], [ctx]))[0]

    def handle_in_thread(message: Message, ctx: SyncContext) -> Outcome | None:
        return handle_all_in_thread([message], [ctx])[0]

    if is_batch:
        outbox.batch_handler("greet", transactional=True, retry=LATER)(handle_all if is_async else handle_all_in_thread)
    else:
        one_by_one = outbox.handler("greet", transactional=True, max_size=64, retry=LATER)
        one_by_one(handle if is_async else handle_in_thread)
    return calls


def enqueue_some(db: psycopg.Connection, *payloads: object) -> list[int]:
    """Enqueue in one transaction, so that one claim takes them."""
    with db.transaction():
        return [enqueue(db, payload=payload) for payload in payloads]


def states(db: psycopg.Connection) -> list[str]:
    return [row.state for row in rows_of(db)]


def transaction_count(db: psycopg.Connection) -> int:
    ((count,),) = db.execute("SELECT count(DISTINCT transaction_id) FROM effect").fetchall()
    return int(count)


@FORMS
@KINDS
@pytest.mark.parametrize("deletes", [False, True], ids=["kept", "deleted as they are sent"])
async def test_messages_that_are_sent_commit_together(
    outbox: Outbox,
    db: psycopg.Connection,
    effects: Callable[[], list[int]],
    *,
    is_async: bool,
    is_batch: bool,
    deletes: bool,
) -> None:
    if deletes:
        Operator(db).set_retention("*", "sent", timedelta())
    calls = register(outbox, is_async=is_async, is_batch=is_batch)
    ids = enqueue_some(db, 1, 2, 3, 4)
    await Worker(outbox).run_once()
    assert effects() == ids
    assert calls == ([ids] if is_batch else [[one] for one in ids])
    # Subtransactions have ids of their own.
    ((completed, written),) = db.execute(
        "SELECT (SELECT count(DISTINCT finished_at) FROM pgoutbox.message), count(DISTINCT transaction_id) FROM effect"
    ).fetchall()
    assert (completed, written) == (0 if deletes else 1, 1)
    assert states(db) == ([] if deletes else ["sent"] * 4)


OUTCOMES: Final[dict[str, Outcome]] = {
    "retry": Transient("busy"),
    "snoozed": Snooze(3600),
    "failed": Permanent("no such user"),
    "skipped": Skip("not needed"),
    "invalid": cast("Outcome", "done"),
}
ENDS: Final = ["sent", "pending", "sent", "pending", "failed", "sent", "skipped", "pending", "sent"]


@FORMS
@KINDS
async def test_a_message_that_is_not_sent_leaves_nothing_and_the_others_are_sent(
    outbox: Outbox, db: psycopg.Connection, effects: Callable[[], list[int]], *, is_async: bool, is_batch: bool
) -> None:
    calls = register(outbox, lambda m, _: OUTCOMES.get(str(m.payload)), is_async=is_async, is_batch=is_batch)
    ids = enqueue_some(db, 1, "retry", 3, "snoozed", "failed", 6, "skipped", "invalid", 9)
    await Worker(outbox).run_once()
    assert states(db) == ENDS
    sent = [ids[0], ids[2], ids[5], ids[8]]
    assert effects() == sent
    # A batch is called again for those that its first call would have sent.
    assert calls == ([ids, sent] if is_batch else [[one] for one in ids])
    assert [row.attempt_count for row in rows_of(db)] == [1] * 9


@FORMS
async def test_a_batch_that_raises_for_one_message_sends_the_others(
    outbox: Outbox, db: psycopg.Connection, effects: Callable[[], list[int]], *, is_async: bool
) -> None:
    def then(message: Message, run: object) -> None:
        if message.payload == "bad":
            raise Permanent("bad")

    register(outbox, then, is_async=is_async, is_batch=True)
    ids = enqueue_some(db, 1, 2, "bad", 4)
    await Worker(outbox).run_once()
    assert states(db) == ["sent", "sent", "failed", "sent"]
    assert effects() == [ids[0], ids[1], ids[3]]


async def test_a_batch_that_raises_for_all_of_its_messages_leaves_nothing(
    outbox: Outbox, db: psycopg.Connection, effects: Callable[[], list[int]]
) -> None:
    def then(message: Message, run: object) -> None:
        if message.payload == "bad":
            raise ConnectionError("the CRM is away")

    register(outbox, then, is_batch=True)
    enqueue_some(db, 1, "bad", 3)
    await Worker(outbox).run_once()
    assert states(db) == ["pending"] * 3
    assert effects() == []
    assert {row.last_error for row in rows_of(db)} == {"ConnectionError: the CRM is away"}


@pytest.mark.parametrize("is_caught", [False, True], ids=["raised", "caught"])
async def test_a_statement_that_fails_is_undone_with_its_message_only(
    outbox: Outbox, db: psycopg.Connection, effects: Callable[[], list[int]], *, is_caught: bool
) -> None:
    def then(message: Message, run: Callable[[str], object]) -> None:
        if message.payload == "bad":
            with contextlib.suppress(*[DivisionByZero] * is_caught):
                run("SELECT 1 / 0")

    register(outbox, then)
    ids = enqueue_some(db, 1, "bad", 3, "bad")
    await Worker(outbox).run_once()
    assert states(db) == ["sent", "pending", "sent", "pending"]
    assert effects() == [ids[0], ids[2]]


@KINDS
async def test_a_message_whose_writes_cannot_be_committed_fails_alone(
    outbox: Outbox, db: psycopg.Connection, effects: Callable[[], list[int]], *, is_batch: bool
) -> None:
    """The server checks a deferred constraint at COMMIT, and does not say which message is at fault."""
    db.execute("CREATE TABLE member (id integer PRIMARY KEY)")
    db.execute("CREATE TABLE visit (member_id integer REFERENCES member DEFERRABLE INITIALLY DEFERRED)")

    def then(message: Message, run: Callable[[str], object]) -> None:
        if message.payload == "bad":
            run("INSERT INTO visit VALUES (1)")

    register(outbox, then, is_batch=is_batch)
    ids = enqueue_some(db, 1, 2, "bad", 4, 5)
    await Worker(outbox).run_once()
    assert states(db) == ["sent", "sent", "pending", "sent", "sent"]
    assert effects() == [ids[0], ids[1], ids[3], ids[4]]
    ((_, outcome, error),) = attempts_of(db, ids[2])
    assert outcome == "retry"
    assert "visit_member_id_fkey" in (error or "")
    assert [row.attempt_count for row in rows_of(db)] == [1] * 5


CHANGES: Final = {
    "of another worker": "worker = 'another'",
    "in its next attempt": "attempt_count = attempt_count + 1, max_attempts = max_attempts + 1",
    "of another claim": "claimed_at = claimed_at + interval '1 ms'",
    "sent": "state = 'sent', key_in_flight = NULL, finished_at = now()",
}


@KINDS
@pytest.mark.parametrize("deletes", [False, True], ids=["kept", "deleted as they are sent"])
async def test_a_message_that_is_lost_meanwhile_takes_its_writes_and_no_others_with_it(
    outbox: Outbox, db: psycopg.Connection, effects: Callable[[], list[int]], *, is_batch: bool, deletes: bool
) -> None:
    if deletes:
        Operator(db).set_retention("*", "sent", timedelta())

    def then(message: Message, run: object) -> None:
        if message.id == ids[-1] and message.id in last:
            last.remove(message.id)
            for one, change in changes.items():
                db.execute(f"UPDATE pgoutbox.message SET {change} WHERE id = %s".encode(), [one])
            before.extend(stale())

    def stale() -> list[tuple[object, ...]]:
        return db.execute("SELECT * FROM pgoutbox.message WHERE id = ANY (%s) ORDER BY id", [[*changes]]).fetchall()

    register(outbox, then, is_batch=is_batch)
    before: list[tuple[object, ...]] = []
    ids = enqueue_some(db, *range(len(CHANGES) + 2))
    last = {ids[-1]}
    changes = dict(zip(ids[1:], CHANGES.values(), strict=False))
    await Worker(outbox).run_once()
    assert effects() == [ids[0], ids[-1]]
    assert stale() == before
    assert len(before) == len(CHANGES)
    own = [row.state for row in rows_of(db, ids[0], ids[-1])]
    assert own == ([] if deletes else ["sent", "sent"])


async def test_an_erased_message_takes_its_writes_with_it(
    outbox: Outbox, db: psycopg.Connection, effects: Callable[[], list[int]]
) -> None:
    def then(message: Message, run: object) -> None:
        if message.payload == "last":
            db.execute("DELETE FROM pgoutbox.message WHERE id = %s", [ids[0]])

    register(outbox, then)
    ids = enqueue_some(db, 1, 2, "last")
    await Worker(outbox).run_once()
    assert effects() == ids[1:]
    assert states(db) == ["sent", "sent"]


@pytest.mark.parametrize("how", ["cancelled", "skipped"])
async def test_a_message_that_is_cancelled_or_superseded_before_its_turn_is_not_handled(
    outbox: Outbox, db: psycopg.Connection, effects: Callable[[], list[int]], how: str
) -> None:
    first_has_begun, may_end = asyncio.Event(), asyncio.Event()

    @outbox.handler("greet", transactional=True, max_size=10)
    async def greet(message: Message, ctx: Context) -> None:
        await ctx.connection.execute(WRITE, [message.id])
        first_has_begun.set()
        await may_end.wait()

    with db.transaction():
        ids = [enqueue(db, coalesce_key=key) for key in "abc"]
    with reports() as heard:
        async with running(Worker(outbox)):
            await first_has_begun.wait()
            if how == "cancelled":
                assert cancel(db, ids[1]) == "requested"
            else:
                enqueue(db, coalesce_key="b", queue="other")
            await until(lambda: "attempt_overtaken" in heard.events)
            may_end.set()
            await until(lambda: all(row.is_finished for row in rows_of(db, *ids)))
    assert [row.state for row in rows_of(db, *ids)] == ["sent", how, "sent"]
    assert effects() == [ids[0], ids[2]]


@pytest.mark.parametrize("how", ["SET ROLE", "SET LOCAL ROLE"])
async def test_a_role_of_one_message_does_not_reach_the_next_one(
    outbox: Outbox, db: psycopg.Connection, effects: Callable[[], list[int]], how: str
) -> None:
    db.execute("GRANT SELECT, INSERT ON effect TO PUBLIC")
    seen: list[object] = []

    def then(message: Message, run: Callable[[str], object]) -> None:
        cursor = cast("psycopg.Cursor[tuple[str]]", run("SELECT current_user"))
        seen.append(cursor.fetchone())
        run(f"{how} pg_monitor")

    register(outbox, then)
    enqueue_some(db, 1, 2, 3)
    await Worker(outbox).run_once()
    assert states(db) == ["sent"] * 3
    assert seen == [(db.info.user,)] * 3


@pytest.mark.parametrize("how", ["COMMIT", "ROLLBACK", "COMMIT AND CHAIN", "COMMIT; BEGIN", "RESET ALL"])
async def test_a_handler_that_ends_the_shared_transaction_fails_alone(
    outbox: Outbox, db: psycopg.Connection, effects: Callable[[], list[int]], how: str
) -> None:
    def then(message: Message, run: Callable[[str], object]) -> None:
        if message.payload == "bad":
            run(how)

    register(outbox, then)
    ids = enqueue_some(db, 1, "bad", 3)
    async with running(Worker(outbox)):
        await until(lambda: states(db) == ["sent", "pending", "sent"])
    ((_, outcome, error),) = attempts_of(db, ids[1])
    assert outcome == "retry"
    assert "RESET ALL" in str(error) or "ended its transaction" in str(error)
    assert [outcome for one in (ids[0], ids[2]) for _, outcome, _ in attempts_of(db, one)] in (
        [],
        ["released", "released"],
    )


async def test_a_handler_whose_session_is_lost_uses_up_no_attempt_of_others(
    outbox: Outbox, db: psycopg.Connection, effects: Callable[[], list[int]]
) -> None:
    def then(message: Message, run: Callable[[str], object]) -> None:
        if message.payload == "bad":
            run("SELECT pg_terminate_backend(pg_backend_pid())")

    register(outbox, then)
    ids = enqueue_some(db, 1, "bad", 3)
    async with running(Worker(outbox)):
        await until(lambda: states(db) == ["sent", "pending", "sent"])
    assert effects() == [ids[0], ids[2]]
    assert [outcome for one in ids for _, outcome, _ in attempts_of(db, one)] == ["released", "retry", "released"]


@FORMS
async def test_a_timeout_is_that_of_one_message(
    dsn: str, db: psycopg.Connection, effects: Callable[[], list[int]], *, is_async: bool
) -> None:
    outbox = Outbox(settings_for(dsn, lease_seconds=1))
    begun: list[int] = []
    may_end = asyncio.Event()
    loop = asyncio.get_running_loop()

    async def hang() -> None:
        await may_end.wait()

    if is_async:

        @outbox.handler("greet", transactional=True, max_size=10, retry=LATER, timeout=0.5)
        async def greet(message: Message, ctx: Context) -> None:
            begun.append(message.id)
            await ctx.connection.execute(WRITE, [message.id])
            if message.payload == "hangs":
                await hang()

    else:

        @outbox.handler("greet", transactional=True, max_size=10, retry=LATER, timeout=0.5)
        def greet_in_thread(message: Message, ctx: SyncContext) -> None:
            begun.append(message.id)
            ctx.connection.execute(WRITE, [message.id])
            if message.payload == "hangs":
                asyncio.run_coroutine_threadsafe(hang(), loop).result()

    ids = enqueue_some(db, 1, "hangs", 3)
    async with running(Worker(outbox)):
        await until(lambda: states(db) == ["sent", "pending", "sent"])
        may_end.set()
    assert effects() == [ids[0], ids[2]]
    assert [outcome for one in ids for _, outcome, _ in attempts_of(db, one)] == ["released", "retry", "released"]
    assert "timed out" in str(attempts_of(db, ids[1])[0][2])
    assert begun[:2] == ids[:2]


async def test_a_timeout_of_one_part_of_a_batch_is_not_that_of_the_others(
    outbox: Outbox, db: psycopg.Connection, effects: Callable[[], list[int]]
) -> None:
    @outbox.batch_handler("greet", transactional=True, retry=LATER, timeout=1)
    async def greet(messages: Sequence[Message], contexts: Sequence[Context]) -> None:
        for message in messages:
            await contexts[0].connection.execute(WRITE, [message.id])
            if message.payload == "bad":
                raise Permanent("bad")
            if message.payload == "hangs":
                await asyncio.Event().wait()

    ids = enqueue_some(db, 1, 2, "bad", "hangs")
    async with running(Worker(outbox)):
        await until(lambda: states(db) == ["sent", "sent", "failed", "pending"])
    assert effects() == ids[:2]
    assert "timed out" in str(attempts_of(db, ids[3])[0][2])


async def test_each_message_has_the_whole_timeout(
    outbox: Outbox, db: psycopg.Connection, effects: Callable[[], list[int]]
) -> None:
    @outbox.handler("greet", transactional=True, max_size=10, timeout=2)
    async def greet(message: Message, ctx: Context) -> None:
        await ctx.connection.execute("SELECT pg_sleep(0.5)")
        await ctx.connection.execute(WRITE, [message.id])

    ids = enqueue_some(db, *range(6))
    await Worker(outbox).run_once()
    assert (effects(), states(db)) == (ids, ["sent"] * 6)


def test_a_thread_past_its_timeout_keeps_its_writes_and_begins_no_other_message(
    start_worker: StartWorker, db: psycopg.Connection, effects: Callable[[], list[int]]
) -> None:
    text = """
        import time
        from pgoutbox import Message, Outbox, SyncContext

        outbox = Outbox()

        @outbox.handler("greet", transactional=True, max_size=10, timeout=0.2)
        def greet(message: Message, ctx: SyncContext) -> None:
            ctx.connection.execute("INSERT INTO effect (message_id) VALUES (%s)", [message.id])
            if message.payload == "slow" and message.attempt_count == 1:
                ctx.connection.execute("SELECT pg_sleep(0.6)")
    """
    ids = enqueue_some(db, 1, "slow", 3)
    worker = start_worker(text, "--drain", lease_seconds="60")
    assert worker.wait() == 0, worker.log
    assert (effects(), states(db)) == (ids, ["sent"] * 3)
    assert [outcome for one in ids for _, outcome, _ in attempts_of(db, one)] == ["released"]
    assert [record["message_id"] for record in worker.records("attempt_overdue")] == [ids[1]]


async def test_a_stop_in_the_middle_uses_up_no_attempt(
    dsn: str, db: psycopg.Connection, effects: Callable[[], list[int]]
) -> None:
    outbox = Outbox(settings_for(dsn, shutdown_grace_seconds=0))
    second_has_begun = asyncio.Event()

    @outbox.handler("greet", transactional=True, max_size=10)
    async def greet(message: Message, ctx: Context) -> None:
        await ctx.connection.execute(WRITE, [message.id])
        if message.payload == 2:
            second_has_begun.set()
            await asyncio.Event().wait()

    enqueue_some(db, 1, 2, 3)
    async with running(Worker(outbox)):
        await second_has_begun.wait()
    assert (effects(), states(db)) == ([], ["pending"] * 3)
    assert {outcome for row in rows_of(db) for _, outcome, _ in attempts_of(db, row.id)} == {"released"}


async def test_a_stop_begins_no_other_message_of_a_shared_transaction(
    dsn: str, db: psycopg.Connection, effects: Callable[[], list[int]]
) -> None:
    outbox = Outbox(settings_for(dsn))
    begun, may_end = asyncio.Event(), asyncio.Event()

    @outbox.handler("greet", transactional=True, max_size=10)
    async def greet(message: Message, ctx: Context) -> None:
        await ctx.connection.execute(WRITE, [message.id])
        begun.set()
        await may_end.wait()

    ids = enqueue_some(db, 1, 2, 3)
    worker = Worker(outbox)
    run = asyncio.create_task(worker.run())
    await begun.wait()
    worker.stop()
    may_end.set()
    await run
    assert (effects(), states(db)) == (ids[:1], ["sent", "pending", "pending"])
    assert [outcome for one in ids for _, outcome, _ in attempts_of(db, one)] == ["released"] * 2


def test_a_stop_leaves_only_the_message_of_a_running_thread_to_its_lease(
    start_worker: StartWorker, db: psycopg.Connection, effects: Callable[[], list[int]], gate: Callable[[], bool]
) -> None:
    enqueue_some(db, 1, 2, 3)
    worker = start_worker(GATED_THREAD, lease_seconds="60", shutdown_grace_seconds="0")
    wait_until(gate, lambda: worker.log)
    assert worker.stop() == 0, worker.log
    assert states(db) == ["sending", "pending", "pending"]


async def test_messages_beside_a_timeout_are_not_unknown(
    dsn: str, db: psycopg.Connection, effects: Callable[[], list[int]]
) -> None:
    outbox = Outbox(settings_for(dsn))

    @outbox.handler("greet", transactional=True, max_size=10, retry=LATER, timeout=0.5, on_unknown="hold")
    async def greet(message: Message, ctx: Context) -> None:
        await ctx.connection.execute(WRITE, [message.id])
        if message.payload == "hangs":
            await asyncio.Event().wait()

    ids = enqueue_some(db, 1, "hangs", 3)
    async with running(Worker(outbox)):
        await until(lambda: states(db) == ["sent", "failed", "sent"])
    assert effects() == [ids[0], ids[2]]


GATED_THREAD: Final = """
    import threading

    from pgoutbox import Message, Outbox, SyncContext

    outbox = Outbox()

    @outbox.handler("greet", transactional=True, max_size=10)
    def greet(message: Message, ctx: SyncContext) -> None:
        try:
            ctx.connection.execute("SELECT pg_advisory_xact_lock_shared(4701)")
        finally:  # The stop breaks the connection, and may then find that the thread has ended.
            threading.Event().wait()
"""
GATED: Final = """
    from pgoutbox import Context, Message, Outbox

    outbox = Outbox()

    @outbox.handler("greet", transactional=True, max_size=10)
    async def greet(message: Message, ctx: Context) -> None:
        await ctx.connection.execute("INSERT INTO effect (message_id) VALUES (%s)", [message.id])
        await ctx.connection.execute("UPDATE stock SET count = count + 1")
        if message.payload == "last":
            await ctx.connection.execute("SELECT pg_advisory_xact_lock_shared(4701)")
"""


@pytest.fixture
def gate(db: psycopg.Connection) -> Iterator[Callable[[], bool]]:
    """Hold the last handlers at a lock, and return a function that tells whether one waits for it."""
    db.execute("CREATE TABLE stock (count integer); INSERT INTO stock VALUES (0)")
    db.execute("SELECT pg_advisory_lock(4701)")
    waits = (
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'advisory'"
        " AND application_name LIKE 'pgoutbox attempts %'"
    )
    yield lambda: db.execute(waits).fetchone() == (1,)
    db.execute("SELECT pg_advisory_unlock_all()")


def test_a_worker_that_is_killed_in_the_middle_has_written_nothing(
    start_worker: StartWorker, db: psycopg.Connection, effects: Callable[[], list[int]], gate: Callable[[], bool]
) -> None:
    ids = enqueue_some(db, 1, 2, "last")
    worker = start_worker(GATED, lease_seconds="60")
    wait_until(gate, lambda: worker.log)
    worker.kill()
    db.execute("SELECT pg_advisory_unlock_all()")
    wait_until(lambda: not gate(), lambda: "the session ends")
    assert (effects(), states(db)) == ([], ["sending"] * 3)
    lapse(db, ids[0])
    assert start_worker(GATED, "--drain").wait() == 0
    assert (effects(), states(db)) == (ids, ["sent"] * 3)


@pytest.mark.parametrize("gone", [0, 1, 2], ids=["first", "second", "last"])
def test_the_session_of_a_suspended_worker_ends_with_any_of_its_attempts(
    start_worker: StartWorker,
    db: psycopg.Connection,
    effects: Callable[[], list[int]],
    gate: Callable[[], bool],
    gone: int,
) -> None:
    """It has a row that the next attempts need, and one of its messages is gone."""
    ids = enqueue_some(db, 1, 2, "last")
    suspended = start_worker(GATED, lease_seconds="3600")
    wait_until(gate, lambda: suspended.log)
    suspended.send_signal(signal.SIGSTOP)
    db.execute("SELECT pg_advisory_unlock_all()")
    db.execute("DELETE FROM pgoutbox.message WHERE id = %s", [ids[gone]])
    lapse(db, ids[gone - 1])
    rest = [one for one in ids if one != ids[gone]]
    assert start_worker(GATED, "--drain").wait() == 0
    suspended.send_signal(signal.SIGCONT)
    assert (effects(), states(db)) == (rest, ["sent"] * 2)


def test_a_claim_that_is_lost_in_part_keeps_its_other_sessions(
    start_worker: StartWorker, db: psycopg.Connection, effects: Callable[[], list[int]], gate: Callable[[], bool]
) -> None:
    """The other worker serves one of the topics."""
    with db.transaction():
        lost, kept = enqueue(db, "other"), enqueue(db, payload="last")
    other = """
    @outbox.handler("other")
    async def other(message: Message, ctx: Context) -> None:
        await asyncio.Event().wait()
"""
    suspended = start_worker("    import asyncio\n" + GATED + other, lease_seconds="3600")
    wait_until(lambda: gate() and states(db) == ["sending"] * 2, lambda: suspended.log)
    suspended.send_signal(signal.SIGSTOP)
    lapse(db, lost)
    quick = """
    from pgoutbox import Context, Message, Outbox

    outbox = Outbox()

    @outbox.handler("other")
    async def other(message: Message, ctx: Context) -> None: ...
"""
    assert start_worker(quick, "--drain").wait() == 0
    suspended.send_signal(signal.SIGCONT)
    db.execute("SELECT pg_advisory_unlock_all()")
    wait_until(lambda: states(db) == ["sent"] * 2, lambda: suspended.log)
    assert (effects(), attempts_of(db, kept)) == ([kept], [])


def test_the_size_of_a_shared_transaction_is_checked() -> None:
    def greet(message: Message, ctx: SyncContext) -> None: ...

    for size in (0, 65):
        with pytest.raises(ConfigurationError, match=f"max_size={size}: must be 1 to 64"):
            Outbox().handler("greet", transactional=True, max_size=size)(greet)
    with pytest.raises(ConfigurationError, match="max_size: needs transactional=True"):
        Outbox().handler("greet", max_size=2)(greet)
