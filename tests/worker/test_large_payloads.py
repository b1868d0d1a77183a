"""Tests payloads and contents that a claim leaves out because of their size: the slot of their attempt reads them."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Final, LiteralString

import psycopg
import pytest
from cryptography.fernet import Fernet

from pgoutbox import Failure, Message, Outbox, Topic
from pgoutbox.message import Permanent
from pgoutbox.worker import Worker, payloads
from tests.support.outbox_actions import (
    PATIENCE_SECONDS,
    attempts_of,
    cancel,
    enqueue,
    row_of,
    rows_of,
    running,
    settings_for,
    state_of,
)
from tests.support.waiting import until
from tests.support.worker_sql import claim, run_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pgoutbox.handlers import Context, SyncContext
    from tests.conftest import Connect

LARGE: Final = {"text": "x" * 40_000}


# A few hundred bytes in PostgreSQL.
NUMBERS: Final = f"[{', '.join(['1e4000'] * 9)}]"


def enqueue_json(db: psycopg.Connection, payload: str, topic: str = "greet") -> int:
    ((message_id,),) = db.execute("SELECT pgoutbox.enqueue(%s, %s::jsonb)", [topic, payload]).fetchall()
    return int(message_id)


def fan_out(outbox: Outbox, connection: psycopg.Connection, content: object, *, payload: object = LARGE) -> list[int]:
    """Enqueue three messages with one content. Return their ids."""
    made = outbox.on(connection).enqueue_fanout("greet", payload, ["a:1", "a:2", "a:3"], content=content)
    connection.commit()
    return [message.id for message in made]


def test_a_claim_leaves_out_a_payload_by_the_size_of_its_text(rolled_back: psycopg.Connection) -> None:
    texts = ['{"text": "' + "x" * (size - 12) + '"}' for size in (16_384, 16_385)] + ["1", NUMBERS]
    ids = [enqueue_json(rolled_back, text) for text in texts]
    assert {row.id: row.payload_json for row in claim(rolled_back)} == dict(
        zip(ids, [texts[0], None, "1", None], strict=True)
    )


@pytest.mark.parametrize(
    ("payload", "value"), [(json.dumps(LARGE), LARGE), (NUMBERS, [10**4000] * 9)], ids=["text", "numbers"]
)
async def test_every_kind_of_handler_gets_a_large_payload(
    dsn: str, db: psycopg.Connection, payload: str, value: object
) -> None:
    outbox = Outbox(settings_for(dsn))
    seen: dict[str, object] = {}

    @outbox.handler("async")
    async def greet(message: Message, ctx: Context) -> None:
        seen[message.topic] = message.payload

    @outbox.handler("sync")
    def greet_in_thread(message: Message, ctx: SyncContext) -> None:
        seen[message.topic] = message.payload

    @outbox.handler("transactional", transactional=True)
    async def greet_in_transaction(message: Message, ctx: Context) -> None:
        seen[message.topic] = message.payload

    @outbox.batch_handler("batch", max_size=10)
    async def greet_all(messages: Sequence[Message], ctxs: Sequence[Context]) -> None:
        seen.update({f"batch {message.id}": message.payload for message in messages})

    ids = [enqueue_json(db, payload, topic) for topic in ("async", "sync", "transactional", "batch", "batch")]
    small = enqueue(db, "batch", payload={"small": True})
    worker = Worker(outbox)
    await worker.run_once()
    assert {row.state for row in rows_of(db, *ids)} == {"sent"}
    expected = dict.fromkeys(("async", "sync", "transactional", f"batch {ids[3]}", f"batch {ids[4]}"), value)
    assert seen == {**expected, f"batch {small}": {"small": True}}


async def test_an_encrypted_large_payload_is_decrypted_also_for_the_hook_of_a_failure(
    dsn: str, connect: Connect
) -> None:
    outbox = Outbox(settings_for(dsn, encryption_keys=Fernet.generate_key().decode()))
    outbox.define(Topic("greet", encrypted=True, coalesce_key=lambda p: str(len(p["text"]))))
    seen: list[object] = []

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None:
        seen.append(message.payload)
        raise Permanent("no")

    @outbox.on_failed("greet")
    async def note(message: Message[Failure], ctx: Context) -> None:
        seen.append(message.payload.payload)

    with connect() as connection:
        outbox.on(connection).enqueue("greet", LARGE, destination="mailto:ann@example.org")
        connection.commit()
    await Worker(outbox).drain()
    assert seen == [LARGE, LARGE]


@pytest.mark.slow
@pytest.mark.parametrize("what", ["payload", "content"])
async def test_few_large_texts_are_in_memory_at_a_time(
    dsn: str, connect: Connect, db: psycopg.Connection, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Each handler asks the database, so the slots beside it have time to read the next ones."""
    monkeypatch.setattr(payloads, "_HELD_CHARS", len(json.dumps(LARGE)))
    outbox = Outbox(settings_for(dsn, concurrency=10))
    held: list[int] = []

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None:
        for _ in range(5):
            await ctx.ensure_lease()
            texts = (getattr(attempt.message, what) for attempt in run_of(worker).state.in_flight.values())
            held.append(len({id(text) for text in texts if text}))

    connection = connect()
    ids = [
        message_id
        for _ in range(10)
        for message_id in (
            [enqueue(db, payload=LARGE)] if what == "payload" else fan_out(outbox, connection, LARGE, payload={})
        )
    ]
    worker = Worker(outbox)
    await worker.run_once()
    assert {row.state for row in rows_of(db, *ids)} == {"sent"}
    assert max(held) == 2


async def test_the_timeout_of_an_attempt_begins_when_its_payload_is_read(
    dsn: str, db: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(payloads, "_HELD_CHARS", 0)
    outbox = Outbox(settings_for(dsn))

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None:
        await until(lambda: state_of(db, clock) == "failed")

    @outbox.handler("hold", timeout=0.05, on_unknown="hold")
    async def hold(message: Message, ctx: Context) -> None:
        """Return at once, after a wait that was longer than the timeout."""

    @outbox.handler("clock", timeout=0.06, on_unknown="hold")
    async def run_out(message: Message, ctx: Context) -> None:
        await asyncio.Event().wait()

    enqueue(db, payload=LARGE)
    waiting = enqueue(db, "hold", payload=LARGE)
    clock = enqueue(db, "clock")
    await Worker(outbox).run_once()
    assert (state_of(db, waiting), attempts_of(db, waiting)) == ("sent", [])


async def test_a_stopping_worker_releases_a_message_that_waits_for_memory(
    dsn: str, db: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(payloads, "_HELD_CHARS", 0)
    outbox = Outbox(settings_for(dsn, shutdown_grace_seconds=PATIENCE_SECONDS))

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None:
        if message.id == holding:
            worker.stop()
            await until(lambda: state_of(db, waiting) == "pending")

    holding, waiting = enqueue(db, payload=LARGE), enqueue(db, payload=LARGE)
    worker = Worker(outbox)
    await worker.run()
    assert state_of(db, holding) == "sent"
    assert [attempt[:2] for attempt in attempts_of(db, waiting)] == [(1, "released")]


@pytest.mark.slow
async def test_a_message_that_is_cancelled_while_it_waits_for_memory_is_not_handed_over(
    dsn: str, db: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(payloads, "_HELD_CHARS", 0)
    outbox = Outbox(settings_for(dsn))
    handed_over: list[int] = []

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None:
        handed_over.append(message.id)
        if message.id == holding:
            cancel(db, waiting)
            await until(lambda: run_of(worker).state.in_flight[waiting].overtaken == "cancelled")

    holding, waiting = enqueue(db, payload=LARGE), enqueue(db, payload=LARGE)
    worker = Worker(outbox)
    await worker.run_once()
    assert handed_over == [holding]
    assert state_of(db, waiting) == "cancelled"


END_WAITING_READ: Final = """
    SELECT pg_terminate_backend(pid)
    FROM pg_stat_activity
    WHERE datname = current_database() AND application_name = 'pgoutbox attempt' AND wait_event_type = 'Lock'
"""


async def test_a_message_whose_payload_the_database_does_not_give_is_snoozed(
    dsn: str, db: psycopg.Connection, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(payloads, "_PAUSE_SECONDS", 0.01)
    outbox = Outbox(settings_for(dsn, concurrency=1))
    locker = connect()

    @outbox.handler("first")
    async def first(message: Message, ctx: Context) -> None:
        # In a thread: the worker may have a statement on its way, whose locks end only when its event loop runs.
        await asyncio.to_thread(locker.execute, "LOCK TABLE pgoutbox.message_live")

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None:
        assert message.payload == LARGE

    @outbox.handler("fast")
    async def fast(message: Message, ctx: Context) -> None:
        pass

    enqueue(db, "fast")  # After a fast message, both others are claimed at once.
    enqueue(db, "first")
    message_id = enqueue(db, payload=LARGE)
    async with running(Worker(outbox)):
        await until(lambda: db.execute(END_WAITING_READ).fetchall() == [(True,)])
        locker.rollback()
        await until(lambda: state_of(db, message_id) == "sent")
    assert attempts_of(db, message_id) == [(1, "snoozed", "its payload could not be read: AdminShutdown")]


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        "worker = 'other'",
        "claimed_at = claimed_at + interval '1 s'",
        "attempt_count = attempt_count + 1",
        "state = 'pending', lane = 1, available_at = now() + interval '1 hour'",
    ],
)
async def test_an_attempt_that_has_lost_its_message_gets_no_payload(
    dsn: str, db: psycopg.Connection, change: LiteralString
) -> None:
    """The other attempt's message is not failed for a payload that it still needs."""
    outbox = Outbox(settings_for(dsn))
    seen: list[int] = []

    @outbox.handler("first")
    async def first(message: Message, ctx: Context) -> None:  # It runs before the next slot reads.
        db.execute(f"UPDATE pgoutbox.message SET {change} WHERE id = {message_id}".encode())

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None:
        seen.append(message.id)

    enqueue(db, "first")
    message_id = enqueue(db, payload=LARGE)
    await Worker(outbox).run_once()
    assert seen == []
    assert not row_of(db, message_id).is_finished


# --- contents ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_encrypted", [False, True])
async def test_the_messages_of_a_fan_out_share_a_large_content(
    dsn: str, connect: Connect, db: psycopg.Connection, *, is_encrypted: bool
) -> None:
    outbox = Outbox(settings_for(dsn, encryption_keys=Fernet.generate_key().decode()))
    outbox.define(Topic("greet", encrypted=is_encrypted))
    seen: list[Message] = []

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None:
        seen.append(message)
        await ctx.ensure_lease()  # The next slot begins meanwhile.

    ids = fan_out(outbox, connect(), LARGE)
    worker = Worker(outbox)
    await worker.run_once()
    assert {row.state for row in rows_of(db, *ids)} == {"sent"}
    assert [(message.payload, message.content) for message in seen] == [(LARGE, LARGE)] * 3
    assert len({id(message.content) for message in seen}) == 1


@pytest.mark.slow
async def test_a_content_that_no_attempt_uses_makes_none_wait(
    dsn: str, connect: Connect, db: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(payloads, "_HELD_CHARS", len(json.dumps(LARGE)))
    outbox = Outbox(settings_for(dsn))
    connection = connect()

    @outbox.handler("first")
    async def first(message: Message, ctx: Context) -> None:
        outbox.on(connection).enqueue_fanout("greet", {}, ["a:1"], content=LARGE)
        connection.commit()
        await until(lambda: state_of(db, message.id + 1) == "sent")
        last = enqueue(db, payload=LARGE)
        await until(lambda: state_of(db, last) == "sent")

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None:
        """Only its texts matter."""

    message_id = enqueue(db, "first", payload=LARGE)
    async with running(Worker(outbox)):
        await until(lambda: state_of(db, message_id) == "sent")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "state", "error"),
    [
        ("DELETE FROM pgoutbox.content", "failed", "its content 1 is missing: it has been deleted"),
        (
            "UPDATE pgoutbox.content SET body = jsonb_set(body, '{pgoutbox.encrypted}', '\"x\"')",
            "pending",
            "no key of PGOUTBOX_ENCRYPTION_KEYS opens the payload: add the one that it was encrypted with",
        ),
    ],
    ids=["missing", "without its key"],
)
async def test_a_large_content_that_cannot_be_read_is_the_outcome_of_its_messages(
    dsn: str, connect: Connect, db: psycopg.Connection, change: LiteralString, state: str, error: str
) -> None:
    outbox = Outbox(settings_for(dsn, encryption_keys=Fernet.generate_key().decode()))
    outbox.define(Topic("greet", encrypted=True))

    @outbox.handler("first")
    async def first(message: Message, ctx: Context) -> None:  # It runs before the next slot reads.
        db.execute(change)

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None:
        """Only the content matters."""

    enqueue(db, "first")
    ids = fan_out(outbox, connect(), LARGE)
    await Worker(outbox).run_once()
    assert {(row.state, row.last_error) for row in rows_of(db, *ids)} == {(state, error)}
