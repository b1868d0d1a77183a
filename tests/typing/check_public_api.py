"""Types of the public API: read by mypy and pyright, never run.

Each `type: ignore` marks an error that both must report: they report a comment without an error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self, assert_type

from pydantic import BaseModel

from pgoutbox import (
    AsyncProducer,
    CallNext,
    CancelResult,
    Context,
    EditResult,
    Email,
    Enqueued,
    EnqueuedMany,
    Message,
    NewMessage,
    Operator,
    Outbox,
    OwnedMessage,
    Permanent,
    Producer,
    Sent,
    Skip,
    SyncContext,
    Topic,
    Transient,
    Webhook,
    Worker,
)
from pgoutbox.operations import ActResult, Batch, MessageFilter, MessageResult

if TYPE_CHECKING:
    from collections.abc import Sequence

    import psycopg
    import sqlalchemy
    from psycopg.rows import DictRow
    from sqlalchemy import orm
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession

    from pgoutbox.message import Outcome
    from pgoutbox.testing import OutboxDriver, Row


class Activation(BaseModel):
    user_id: int
    email: str


class Other(BaseModel):
    name: str


outbox = Outbox()
activation = outbox.define(
    Topic(
        "mail.activation",
        payload=Activation,
        destination=lambda p: f"mailto:{p.email}",
        coalesce_key=lambda p: str(p.user_id),
    )
)
assert_type(activation, Topic[Activation])
plain = Topic("mail.plain")
assert_type(plain, Topic[Any])
Topic("mail.wrong", payload=Activation, coalesce_key=lambda p: p.user_id)  # type: ignore[arg-type, return-value]
Topic("mail.wrong", payload=Activation, destination=lambda p: p.address)  # type: ignore[attr-defined]


# --- handlers ---------------------------------------------------------------------------------------------------------


@outbox.handler(activation)
async def activate(message: Message[Activation], ctx: Context) -> Email | Skip | None:
    assert_type(message.payload, Activation)
    assert_type(message.payload.email, str)
    assert_type(ctx.should_stop, bool)
    await ctx.ensure_lease()
    return Email(to=message.payload.email, subject="Welcome", text="Hello")


@outbox.handler("shop.order_paid")
async def tell_partner(message: Message, ctx: Context) -> Webhook:
    return Webhook(body={"type": "order.paid", "data": message.payload}, method="PUT", secrets=["whsec_"])


Webhook(body={"at": 7}, method="GET")  # type: ignore[arg-type]
Webhook(body={"at": object()})  # type: ignore[dict-item]


@outbox.handler("mail.plain")
async def send_plain(message: Message, ctx: Context) -> None:
    assert_type(message.payload, Any)


@outbox.handler("mail.sync")
def send_sync(message: Message, ctx: SyncContext) -> Sent | Transient:
    ctx.ensure_lease()
    return Sent()


@outbox.batch_handler(activation, max_size=10)
async def activate_many(messages: Sequence[Message[Activation]], ctxs: Sequence[Context]) -> list[Sent | Permanent]:
    return [Sent() for _ in messages]


@outbox.batch_handler("search.index")
def index(messages: Sequence[Message], ctxs: Sequence[SyncContext]) -> None: ...


@outbox.handler("mail.table")
async def send_table(message: Message[dict[str, int]], ctx: Context) -> None:
    assert_type(message.payload["user_id"], int)


@outbox.middleware
async def count_failures(messages: Sequence[Message], call_next: CallNext) -> Sequence[Outcome]:
    outcomes = await call_next()
    assert_type(outcomes, Sequence[Outcome])
    return outcomes


@outbox.middleware  # type: ignore[type-var]
async def without_messages(call_next: CallNext) -> Sequence[Outcome]:
    return await call_next()


async def call_handlers(
    message: Message[Activation], raw: Message, other: Message[Other], ctx: Context, sync_ctx: SyncContext
) -> None:
    assert_type(await activate(message, ctx), Email | Skip | None)
    assert_type(send_sync(raw, sync_ctx), Sent | Transient)
    await activate(other, ctx)  # type: ignore[arg-type]


@outbox.handler(activation)  # type: ignore[arg-type]
async def with_another_payload(message: Message[Other], ctx: Context) -> None: ...


@outbox.handler(activation)  # type: ignore[type-var]
async def with_another_result(message: Message[Activation], ctx: Context) -> int:
    return 7


@outbox.handler(activation)  # type: ignore[arg-type]
def with_the_async_context(message: Message[Activation], ctx: Context) -> None: ...


@outbox.handler(activation)  # type: ignore[arg-type]
async def without_context(message: Message[Activation]) -> None: ...


# --- enqueue ----------------------------------------------------------------------------------------------------------


def enqueue_on_sync_connections(
    psycopg_connection: psycopg.Connection,
    dict_connection: psycopg.Connection[DictRow],
    async_connection: psycopg.AsyncConnection,
    sqlalchemy_connection: sqlalchemy.Connection,
    session: orm.Session,
    scoped: orm.scoped_session[orm.Session],
    async_session: AsyncSession,
) -> None:
    payload = Activation(user_id=1, email="a@example.org")
    assert_type(outbox.on(psycopg_connection), Producer)
    assert_type(outbox.on(async_connection), AsyncProducer)
    assert_type(outbox.on(psycopg_connection).enqueue(activation, payload), Enqueued)
    assert_type(outbox.on(dict_connection).enqueue("mail.plain", {"user_id": 1}, delay=3, queue="bulk"), Enqueued)
    assert_type(outbox.on(sqlalchemy_connection).enqueue(plain, {"user_id": 1}), Enqueued)
    assert_type(outbox.on(session).enqueue("mail.plain", None, best_effort=False), Enqueued)
    assert_type(outbox.on(scoped).enqueue("mail.plain", [1], best_effort=True), Enqueued | None)
    assert_type(outbox.on(session).enqueue_many([NewMessage(activation, payload), NewMessage("a", 1)]), EnqueuedMany)
    assert_type(outbox.on(session).cancel(1), CancelResult)

    outbox.on(psycopg_connection).enqueue(activation, Other(name="x"))  # type: ignore[misc]
    outbox.on(psycopg_connection).enqueue(activation, {"user_id": 1})  # type: ignore[misc]
    outbox.on(psycopg_connection).enqueue("mail.plain", 1, qeue="bulk")  # type: ignore[call-overload]
    outbox.on(psycopg_connection).enqueue("mail.plain", 1, max_attempts="3")  # type: ignore[call-overload]
    outbox.on(async_connection).enqueue("mail.plain", 1)  # type: ignore[unused-coroutine]
    outbox.on(async_session).enqueue("mail.plain", 1)  # type: ignore[unused-coroutine]
    outbox.on(async_connection).cancel(1)  # type: ignore[unused-coroutine]
    NewMessage(activation, Other(name="x"))  # type: ignore[misc]


async def enqueue_on_async_connections(
    psycopg_connection: psycopg.AsyncConnection,
    sync_connection: psycopg.Connection,
    connection: AsyncConnection,
    session: AsyncSession,
) -> None:
    assert_type(await outbox.on(psycopg_connection).enqueue(plain, {"user_id": 1}), Enqueued)
    assert_type(await outbox.on(connection).enqueue("mail.plain", 1, best_effort=True), Enqueued | None)
    assert_type(await outbox.on(session).enqueue_many([NewMessage("a", 1)]), EnqueuedMany)
    assert_type(await outbox.on(session).cancel(topic="a", dedupe_key="k"), CancelResult)
    assert_type(await outbox.on(session).find(owner="a", topics=[plain]), list[OwnedMessage])
    assert_type(await outbox.on(session).edit(1, owner="a", payload=1), EditResult)
    assert_type(outbox.on(sync_connection).find(owner="a"), list[OwnedMessage])
    assert_type(outbox.on(sync_connection).edit(1, owner="a", delay=1), EditResult)
    await outbox.on(sync_connection).enqueue("mail.plain", 1)  # type: ignore[misc]
    outbox.on(object())  # type: ignore[call-overload]


class DjangoStubs:
    """The shape of Django's connection in `django-stubs`."""

    in_atomic_block: bool
    needs_rollback: bool

    def get_autocommit(self) -> bool:
        return False

    def cursor(self) -> CursorStubs:
        return CursorStubs()


class CursorStubs:
    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None: ...


class RecordStubs:
    """A row in `asyncpg-stubs`: not a sequence."""


class AsyncpgStubs:
    """The shape of a pool's connection in `asyncpg-stubs`."""

    def is_closed(self) -> bool:
        return False

    def is_in_transaction(self) -> bool:
        return True

    async def fetch(self, query: str, *args: object) -> list[RecordStubs]:
        return []


async def enqueue_on_drivers_with_type_stubs(django: DjangoStubs, asyncpg: AsyncpgStubs) -> None:
    assert_type(outbox.on(django).enqueue(plain, 1), Enqueued)
    assert_type(await outbox.on(asyncpg).enqueue(plain, 1), Enqueued)
    outbox.on(asyncpg).enqueue(plain, 1)  # type: ignore[unused-coroutine]


# --- workers and tests ------------------------------------------------------------------------------------------------


async def run_workers() -> None:
    worker = Worker(outbox, queues=["critical:3", "default:1"])
    assert_type(await worker.run_once(), None)
    worker.stop()
    Worker("shop:outbox")  # type: ignore[arg-type]


def test_with_the_plugin(driver: OutboxDriver) -> None:
    driver.answer_with(lambda delivery: Transient("451 busy") if delivery.message.attempt_count == 1 else Sent())
    assert_type(driver.assert_enqueued("mail.activation", count=1), list[Row])
    driver.answer_with(lambda delivery: None)  # type: ignore[arg-type, return-value]


# --- operators --------------------------------------------------------------------------------------------------------


def operate(dsn: str, connection: psycopg.Connection) -> None:
    with Operator(dsn, actor="ada") as operator:
        assert_type(operator, Operator)
        assert_type(operator.redrive(42), MessageResult)
        assert_type(operator.resend(42).result, ActResult)
        assert_type(operator.cancel(42).result, ActResult)
        assert_type(operator.dismiss(42, "spam").result, ActResult)
        assert_type(operator.snooze(42, 60, "later").result, ActResult)
        assert_type(operator.act_on_all("redrive", MessageFilter(topic="mail"))["redriven"], int)
        for batch in operator.bulk("cancel", [41, 42]):
            assert_type(batch, Batch)
            assert_type([answer.result for answer in batch.results], list[ActResult])
        operator.bulk("delete", [42])  # type: ignore[arg-type]
        operator.redrive("42")  # type: ignore[arg-type]
    Operator(connection, actor="ada", origin="runbook").pause("mail")
    Operator(dsn, "ada")  # type: ignore[call-arg]
