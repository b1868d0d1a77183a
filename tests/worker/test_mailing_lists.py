"""Tests how the attempts of a mailing list ask about their addresses."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from pgoutbox import Context, Email, Message, Outbox, Topic, Worker
from pgoutbox.clock import elapsed_clock
from pgoutbox.database import sql
from pgoutbox.database.worker_connection import WorkerConnection
from pgoutbox.operations import Operator
from pgoutbox.worker import mailing_lists
from tests.support.outbox_actions import rows_of, settings_for
from tests.support.smtp_server import accepting_server, mail_settings

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import LiteralString

    import psycopg
    from psycopg.rows import TupleRow


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


async def deliver(
    dsn: str, db: psycopg.Connection, *, count: int, mailing_list: str | None, batch: bool = False
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
    assert {row.state for row in rows_of(db)} == {"sent"}


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
    dsn: str, db: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with accepting_server() as inbox:
        outbox = Outbox(settings_for(dsn, **mail_settings(inbox.port)))

        @outbox.handler(Topic("news", mailing_list="news"))
        async def news(message: Message, ctx: Context) -> Email:
            Operator(db).suppress("ada@example.org", "complaint")
            monkeypatch.setattr(mailing_lists, "_FRESH_SECONDS", 0.2)
            await asyncio.sleep(0.3)
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


def test_the_question_reads_by_the_primary_key(db: psycopg.Connection) -> None:
    db.execute(
        "INSERT INTO pgoutbox.suppression (digest, mailing_list, reason)"
        " SELECT md5(n::text), '', 'manual' FROM generate_series(1, 20000) AS n"
    )
    db.execute("ANALYZE pgoutbox.suppression")
    before = db.execute("SELECT seq_scan, idx_scan FROM pg_stat_user_tables WHERE relname = 'suppression'").fetchone()
    db.execute("SELECT FROM pgoutbox._suppressed('{ada@example.org,otto@example.org}', '{news,news}')")
    db.execute("SELECT pg_stat_force_next_flush()")
    after = db.execute("SELECT seq_scan, idx_scan FROM pg_stat_user_tables WHERE relname = 'suppression'").fetchone()
    assert before is not None
    assert after is not None
    assert (after[0] - before[0], after[1] - before[1] > 0) == (0, True)
