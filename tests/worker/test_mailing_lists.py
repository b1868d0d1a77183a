"""Tests how the attempts of a mailing list ask about their addresses."""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING

import psycopg
import pytest

from pgoutbox import Context, Email, Message, Outbox, Permanent, Sent, SyncContext, Topic, Worker
from pgoutbox.clock import elapsed_clock
from pgoutbox.database import sql
from pgoutbox.database.worker_connection import WorkerConnection
from pgoutbox.operations import Operator
from pgoutbox.transports import Content, pass_gate
from pgoutbox.worker import executor, mailing_lists
from pgoutbox.worker.threads import AttemptThreads
from tests.support.outbox_actions import enqueue, rows_of, settings_for
from tests.support.smtp_server import accepting_server, mail_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import LiteralString

    from psycopg.rows import TupleRow

    from pgoutbox import Outcome


@pytest.fixture
def questions(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the number of addresses of each question that workers ask."""
    asked: list[int] = []
    fetch = WorkerConnection.fetch

    async def counted(
        self: WorkerConnection, statement: LiteralString, parameters: Mapping[str, object]
    ) -> Sequence[TupleRow]:
        if statement == sql.SUPPRESSED:
            addresses = parameters["addresses"]
            assert isinstance(addresses, list)
            asked.append(len(addresses))
        return await fetch(self, statement, parameters)

    monkeypatch.setattr(WorkerConnection, "fetch", counted)
    return asked


@pytest.fixture
def grow_old(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Let three seconds pass for the answers that attempts have, as if the handler had taken them."""
    ahead = 0.0

    def pass_by() -> None:
        nonlocal ahead
        ahead += 3.0

    monkeypatch.setattr(mailing_lists, "elapsed_clock", lambda: elapsed_clock() + ahead)
    return pass_by


async def deliver(
    dsn: str,
    db: psycopg.Connection,
    *,
    count: int,
    mailing_list: str | None,
    batch: bool = False,
    state: str = "sent",
) -> None:
    outbox = Outbox(settings_for(dsn, concurrency=20, batch_size=100))
    topic = Topic("news", mailing_list=mailing_list)
    if batch:

        @outbox.batch_handler(topic, max_size=100)
        async def handle_all(messages: Sequence[Message], contexts: Sequence[Context]) -> None: ...

    else:

        @outbox.handler(topic)
        async def handle(message: Message, ctx: Context) -> None:
            await asyncio.sleep(0)

    with db.transaction():
        outbox.on(db).enqueue_fanout("news", None, ["mailto:ada@example.org"] * count)
    await Worker(outbox).run_once()
    assert {row.state for row in rows_of(db)} == {state}


async def test_attempts_that_wait_share_a_question(dsn: str, db: psycopg.Connection, questions: list[int]) -> None:
    await deliver(dsn, db, count=100, mailing_list="news")
    assert sum(questions) == 100
    assert len(questions) <= 25


async def test_a_batch_asks_together(dsn: str, db: psycopg.Connection, questions: list[int]) -> None:
    await deliver(dsn, db, count=100, mailing_list="news", batch=True)
    assert sum(questions) == 100
    assert len(questions) <= 3  # A claim may find fewer messages.


async def test_a_topic_without_a_list_asks_nothing(dsn: str, db: psycopg.Connection, questions: list[int]) -> None:
    await deliver(dsn, db, count=10, mailing_list=None)
    assert questions == []


async def test_a_mail_of_a_slow_handler_is_not_sent_after_the_suppression(
    dsn: str, db: psycopg.Connection, grow_old: Callable[[], None]
) -> None:
    async with accepting_server() as inbox:
        outbox = Outbox(settings_for(dsn, **mail_settings(inbox.port)))

        @outbox.handler(Topic("news", mailing_list="news"))
        async def news(message: Message, ctx: Context) -> Email:
            Operator(db).suppress("ada@example.org", "complaint")
            grow_old()
            return Email(subject="News", text="News")

        outbox.on(db).enqueue("news", None, destination="mailto:ada@example.org", require_transaction=False)
        await Worker(outbox).run_once()
    (row,) = rows_of(db)
    assert (row.state, row.skip_reason, inbox.received) == ("skipped", "suppressed: complaint", [])


async def test_a_process_that_was_suspended_after_the_answer_asks_again(
    dsn: str, db: psycopg.Connection, questions: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([1.0, 60.0])
    monkeypatch.setattr(mailing_lists, "elapsed_clock", lambda: next(times, None) or elapsed_clock())
    await deliver(dsn, db, count=1, mailing_list="news")
    assert questions == [1, 1]


async def test_a_message_waits_after_three_slow_answers(
    dsn: str, db: psycopg.Connection, questions: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = itertools.count(1_000_000, 3)
    monkeypatch.setattr(mailing_lists, "elapsed_clock", lambda: float(next(ticks)))
    await deliver(dsn, db, count=1, mailing_list="news", state="pending")
    assert questions == [1, 1, 1]
    assert (
        rows_of(db)[0].last_error == "not sent: the suppressed addresses are unknown: the database answers too slowly"
    )


async def test_a_handler_that_waited_for_its_thread_asks_again(
    dsn: str, db: psycopg.Connection, monkeypatch: pytest.MonkeyPatch, grow_old: Callable[[], None]
) -> None:
    """The thread of the first message is the only one."""
    outbox, begun = Outbox(settings_for(dsn, concurrency=2)), list[str | None]()
    monkeypatch.setattr(executor, "AttemptThreads", lambda _: AttemptThreads(1))

    @outbox.handler(Topic("news", mailing_list="news"))
    def news(message: Message, ctx: SyncContext) -> None:
        begun.append(message.destination)
        with psycopg.connect(dsn, autocommit=True) as connection:
            Operator(connection).suppress("ada@example.org", "complaint")
            Operator(connection).suppress("otto@example.org", "complaint")
        grow_old()

    with db.transaction():
        outbox.on(db).enqueue_fanout("news", None, ["mailto:ada@example.org", "mailto:otto@example.org"])
    await Worker(outbox).run_once()
    assert len(begun) == 1
    assert sorted(row.state for row in rows_of(db)) == ["sent", "skipped"]


@pytest.mark.parametrize("transactional", [False, True])
async def test_a_half_of_a_batch_that_is_tried_again_is_asked_about_again(
    dsn: str, db: psycopg.Connection, grow_old: Callable[[], None], transactional: bool
) -> None:
    outbox, begun = Outbox(settings_for(dsn)), list[list[str | None]]()
    both = ["mailto:ada@example.org", "mailto:otto@example.org"]

    @outbox.batch_handler(Topic("news", mailing_list="news"), transactional=transactional)
    async def news(messages: Sequence[Message], contexts: Sequence[Context]) -> None:
        begun.append([message.destination for message in messages])
        if len(messages) > 1:
            Operator(db).suppress("ada@example.org", "complaint")
            grow_old()
            raise Permanent("one of them is wrong")

    with db.transaction():
        outbox.on(db).enqueue_fanout("news", None, both)
    await Worker(outbox).run_once()
    assert begun == [both, both[1:]]
    assert [row.state for row in rows_of(db)] == ["skipped", "sent"]


async def test_a_mail_whose_transport_waits_is_not_handed_over_after_the_suppression(
    dsn: str, db: psycopg.Connection, grow_old: Callable[[], None]
) -> None:
    class Slow:
        schemes, follows_redirect = ("mailto",), True

        async def send(self, message: Message[object], content: Content) -> Outcome:
            Operator(db).suppress("ada@example.org", "complaint")
            grow_old()
            await pass_gate()
            return Sent()

        async def aclose(self) -> None: ...

    outbox = Outbox(settings_for(dsn), transports=[Slow()])

    @outbox.handler(Topic("news", mailing_list="news"))
    async def news(message: Message, ctx: Context) -> Email:
        return Email(subject="News", text="News")

    enqueue(db, "news", destination="mailto:ada@example.org")
    await Worker(outbox).run_once()
    assert [row.state for row in rows_of(db)] == ["skipped"]


def test_the_question_reads_by_the_primary_key(db: psycopg.Connection) -> None:
    db.execute(
        "INSERT INTO pgoutbox.suppression (digest, mailing_list, reason)"
        " SELECT pgoutbox._list_mark() || md5(n::text), '', 'manual' FROM generate_series(1, 20000) AS n"
    )
    db.execute("ANALYZE pgoutbox.suppression")
    before = db.execute("SELECT seq_scan, idx_scan FROM pg_stat_user_tables WHERE relname = 'suppression'").fetchone()
    db.execute("SELECT FROM pgoutbox._suppressed('{ada@example.org,otto@example.org}', '{news,news}')")
    db.execute("SELECT pg_stat_force_next_flush()")
    after = db.execute("SELECT seq_scan, idx_scan FROM pg_stat_user_tables WHERE relname = 'suppression'").fetchone()
    assert before is not None
    assert after is not None
    assert (after[0] - before[0], after[1] - before[1] > 0) == (0, True)
