"""One producer: an endless series of transactions on one driver, some of which roll back, until it is told to stop.

    python -m tests.soak.producer DRIVER SEED

The ledger records the intended commit before the COMMIT, and its answer afterwards. An unanswered COMMIT leaves the
outcome of the transaction unknown.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import os
import random
import signal
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, Final, NamedTuple

import asyncpg
import psycopg
import sqlalchemy
from sqlalchemy.engine import make_url
from sqlalchemy.ext.asyncio import create_async_engine

from pgoutbox import Enqueued, NewMessage, Outbox, TransactionError
from pgoutbox.enqueue.adapters import AsyncConnection, SyncConnection
from tests.soak.app import LONELY_QUEUE, ORDERED_TOPICS, OWNERS, STEADY_QUEUE, TEXT, TOPICS, fanout_key
from tests.soak.host import PORT_VARIABLE
from tests.soak.postbox import WEBHOOK_PORT_VARIABLE
from tests.support.dialogues import HOST
from tests.support.ledger import KEY, Ledger, told_ledger
from tests.support.line_server import SCHEME

logger = logging.getLogger("tests.soak.producer")
COALESCE_KEYS: Final = 40
DEDUPE_KEYS: Final = 2_000
ORDERING_KEYS: Final = 40
THREAD_KEYS: Final = 20
LEAVERS: Final = 20
HOT_KEYS: Final = 4
"""Few keys, so that several producers enqueue for one key at once."""
SPECIAL: Final = [
    "ordered", "ordered", "halted", "halted", "rated", "crowded", "forgotten", "forgotten", "line", "webhook",
    "webhook", "lonely", "thread", "thread", "steady", "steady", "steady",
]  # fmt: skip
# Errors that a producer must expect under faults: it abandons the transaction and begins another one.
FAILURES: Final = (
    psycopg.Error, asyncpg.PostgresError, asyncpg.InterfaceError, sqlalchemy.exc.DBAPIError, OSError, TimeoutError,
    TransactionError,
)  # fmt: skip

Enqueue = Callable[[list[NewMessage[Any]]], Coroutine[Any, Any, Sequence[Enqueued]]]


@dataclasses.dataclass(frozen=True)
class FanOut:
    """A fan-out: one content for these destinations."""

    key: str
    destinations: list[str]

    @property
    def keys(self) -> list[str]:
        """Return the ledger keys, one for each message."""
        return [fanout_key(self.key, destination) for destination in self.destinations]

    @property
    def call(self) -> tuple[str, dict[str, Any], list[str]]:
        """Return the arguments of `enqueue_fanout` besides the content and the queue."""
        return "soak.fanout", {KEY: self.key, "plan": ["ok"], "seconds": 0}, self.destinations


class Enlist(NamedTuple):
    """The possible actions in a transaction."""

    enqueue: Enqueue
    fan_out: Callable[[FanOut], Coroutine[Any, Any, Sequence[Enqueued]]]


Transaction = Callable[[], contextlib.AbstractAsyncContextManager[Enlist]]


class PlannedRollbackError(Exception):
    """Raised when the business transaction decides to roll back."""


def plan(chance: random.Random) -> list[str]:
    """Draw the outcomes of a message's attempts: a few without success, then a success or a permanent failure."""
    steps = chance.choices(["transient", "error", "snooze", "die", "die_after"], [40, 20, 20, 0.2, 0.2], k=3)
    steps = steps[: chance.choice([0, 0, 0, 0, 0, 0, 1, 1, 2, 3])]
    return [*steps, "permanent" if chance.random() < 0.03 else "ok"]


def draw(chance: random.Random, key: str) -> NewMessage[Any]:
    """Draw one message. All values of a dedupe key are drawn from the key, so that they are the same each time."""
    coalesce_key = dedupe_key = delay = None
    kind = chance.random()
    if kind < 0.2:
        number = chance.randrange(DEDUPE_KEYS)
        key = dedupe_key = f"once-{number}"
        chance = random.Random(number)
    elif kind < 0.5:
        coalesce_key = f"key-{chance.randrange(COALESCE_KEYS)}"
    elif kind < 0.75:
        return draw_special(chance, key)
    topic = chance.choice(TOPICS)
    steps = plan(chance)
    if topic == "soak.async" and chance.random() < 0.01:
        steps.insert(0, "hang")
    if chance.random() < 0.1:
        delay = chance.choice([0.2, 1.0, 3.0])
    queue = chance.choice(["default", "default", "bulk"])
    return NewMessage(
        topic,
        {
            KEY: key,
            "plan": steps,
            "seconds": chance.choice([0, 0, 0.01, 0.1, 0.5, 2.0]),
            "text": TEXT * chance.choice([1, 1, 1, 100]),  # Some payloads are stored apart from their messages.
        },
        coalesce_key=coalesce_key,
        dedupe_key=dedupe_key,
        delay=delay,
        queue=queue,
        fair_key=f"tenant-{min(chance.randrange(4), chance.randrange(4))}" if queue == "bulk" else None,
        max_attempts=10_000,
        # Messages with a dedupe key are not cancelled: see `Nemesis.cancel`.
        owner=None if dedupe_key else f"person-{chance.randrange(OWNERS)}",
    )


def draw_special(chance: random.Random, key: str) -> NewMessage[Any]:
    """Draw a special message: ordered, limited, deleted as it is sent, for a destination that can die, a webhook,
    for the lonely worker, or for a thread that outlives its timeout."""
    seconds = chance.choice([0, 0, 0.01, 0.1])
    payload: dict[str, Any] = {KEY: key, "plan": plan(chance), "seconds": seconds, "text": TEXT}
    match chance.choice(SPECIAL):
        case "ordered":
            number = chance.randrange(ORDERING_KEYS)
            return NewMessage(
                "soak.ordered", payload, queue="ordered", ordering_key=f"go-{number}", max_attempts=10_000
            )
        case "halted":
            # A permanently failed message succeeds after a redrive.
            number = chance.randrange(ORDERING_KEYS)
            if payload["plan"][-1] == "permanent" or chance.random() < 0.1:
                payload["plan"] = ["permanent", "ok"]
            return NewMessage(
                "soak.halted",
                payload,
                queue="ordered",
                ordering_key=f"halt-{number}",
                halts_key=True,
                max_attempts=10_000,
            )
        case "forgotten":
            return NewMessage("soak.forgotten", payload, max_attempts=10_000)
        case "line" | "webhook" as kind:
            payload |= {"plan": ["ok"], "text": TEXT * chance.choice([1, 1, 100])}
            scheme, port = (SCHEME, PORT_VARIABLE) if kind == "line" else ("http", WEBHOOK_PORT_VARIABLE)
            destination = f"{scheme}://{HOST}:{os.environ[port]}"
            return NewMessage(f"soak.{kind}", payload, destination=destination, max_attempts=10_000)
        case "lonely":
            topic = chance.choice(["soak.sync", "soak.async", "soak.batch"])
            payload["seconds"] = chance.choice([0.1, 0.5, 1.0])
            return NewMessage(topic, payload, queue=LONELY_QUEUE, max_attempts=10_000)
        case "steady":
            return draw_steady(chance, payload)
        case "thread":
            # Up to twice the timeout, and beyond the grace period of a stop.
            payload["seconds"] = chance.choice([0.1, 1.5, 2.0])
            return draw_threaded(chance, payload)
        case queue:
            if queue == "crowded":
                # Some run for longer than a lease.
                payload["seconds"] = chance.choices([seconds, 3.5], [90, 10])[0]
            # Some begin no attempt and need no permit, because a newer message supersedes them.
            coalesces = chance.random() < 0.3
            return NewMessage(
                "soak.async",
                payload,
                queue=queue,
                coalesce_key=f"{queue}-{chance.randrange(HOT_KEYS)}" if coalesces else None,
                owner=queue,
                max_attempts=10_000,
            )


def draw_steady(chance: random.Random, payload: dict[str, Any]) -> NewMessage[Any]:
    """Draw a message that succeeds at once, of an owner whose messages may be erased."""
    payload |= {"plan": ["ok"], "seconds": 0}
    owner = f"leaver-{chance.randrange(LEAVERS)}"
    return NewMessage("soak.async", payload, queue=STEADY_QUEUE, owner=owner, max_attempts=10_000)


def draw_mails(chance: random.Random, name: str) -> list[NewMessage[Any]]:
    """Draw more e-mails than a worker has connections."""
    return [
        NewMessage("soak.mail", {KEY: f"{name}-{n}", "plan": ["ok"], "seconds": 0}, max_attempts=10_000)
        for n in range(chance.randrange(4, 12))
    ]


def draw_threaded(chance: random.Random, payload: dict[str, Any]) -> NewMessage[Any]:
    """Draw a message whose thread blocks: without a key, with a coalesce key, or with an ordering key."""
    topic = chance.choice(["soak.thread", "soak.errand"])
    number = chance.randrange(THREAD_KEYS)
    match chance.choice(["alone", "coalesced", "ordered"]):
        case "coalesced":
            return NewMessage(topic, payload, coalesce_key=f"thread-{number}", max_attempts=10_000)
        case "ordered":
            return NewMessage(topic, payload, queue="ordered", ordering_key=f"thread-{number}", max_attempts=10_000)
        case _:
            return NewMessage(topic, payload, max_attempts=10_000)


def draw_line(chance: random.Random, name: str) -> list[NewMessage[Any]]:
    """Draw messages of one ordering key and several topics, to be enqueued in one bulk."""
    ordering_key = f"go-{chance.randrange(ORDERING_KEYS)}"
    return [
        NewMessage(
            chance.choice(ORDERED_TOPICS),
            {KEY: f"{name}-{n}", "plan": plan(chance), "seconds": 0, "text": TEXT, "bulk": name, "item": n},
            queue="ordered",
            ordering_key=ordering_key,
            max_attempts=10_000,
        )
        for n in range(chance.randrange(2, 7))
    ]


def _sqlstate(error: BaseException) -> str | None:
    """Return the SQLSTATE of a driver's error, or of the error inside SQLAlchemy's."""
    state = getattr(getattr(error, "orig", error), "sqlstate", None)
    return None if state is None else str(state)


def _change_mind(rolls_back: bool) -> None:
    if rolls_back:
        raise PlannedRollbackError


async def produce(transaction: Transaction, chance: random.Random, ledger: Ledger, stop: asyncio.Event) -> None:
    """Run transactions until `stop`, each with its entries in the ledger."""
    for number in itertools.count():
        if stop.is_set():
            return
        name = f"{os.getpid()}-{number}"
        kind = chance.random()
        if kind < 0.05:
            messages = draw_line(chance, name)
        elif kind < 0.06:
            messages = draw_mails(chance, name)
        else:
            messages = [draw(chance, f"{name}-{n}") for n in range(chance.choice([1, 1, 1, 1, 2, 30]))]
        fan_out = None
        if chance.random() < 0.05:
            fan_out = FanOut(f"{name}-all", [f"mailto:{n}@example.org" for n in range(chance.randrange(1, 8))])
        shared_keys = [] if fan_out is None else fan_out.keys
        keys = [message.payload[KEY] for message in messages] + shared_keys
        # A dedupe key may roll back in one transaction and commit in another.
        own_keys = [message.payload[KEY] for message in messages if "dedupe_key" not in message.options] + shared_keys
        rolls_back = chance.random() < 0.25
        try:
            async with transaction() as enlist:
                await enlist.enqueue(messages)
                if fan_out is not None:
                    await enlist.fan_out(fan_out)
                _change_mind(rolls_back)
                ledger.write("intended", *keys)
            ledger.write("acknowledged", *keys)
        except PlannedRollbackError:
            ledger.write("rolled_back", *own_keys)
        except FAILURES as error:
            if _sqlstate(error) == "54000":
                ledger.write("refused", *keys)
            logger.warning("%s", f"{type(error).__name__}: {error}".splitlines()[0])
            await asyncio.sleep(chance.uniform(0.05, 0.5))
        await asyncio.sleep(chance.expovariate(20))


# --- drivers ----------------------------------------------------------------------------------------------------------


def psycopg_sync(outbox: Outbox, dsn: str) -> Transaction:
    """Open a connection for each transaction, as behind a pooler; use single enqueues and bulks."""

    @contextlib.asynccontextmanager
    async def transaction() -> AsyncIterator[Enlist]:
        with psycopg.connect(dsn, connect_timeout=5) as connection:

            async def enqueue(messages: list[NewMessage[Any]]) -> Sequence[Enqueued]:
                if len(messages) > 1:
                    return outbox.on(connection).enqueue_many(messages)
                (message,) = messages
                return [_one(outbox, connection, message)]

            yield Enlist(enqueue, _fan_out(outbox, connection))

    return transaction


def _one(outbox: Outbox, connection: psycopg.Connection, message: NewMessage[Any]) -> Enqueued:
    return outbox.on(connection).enqueue(message.topic, message.payload, **message.options)


def _fan_out(outbox: Outbox, connection: SyncConnection) -> Callable[[FanOut], Coroutine[Any, Any, Sequence[Enqueued]]]:
    async def fan_out(asked: FanOut) -> Sequence[Enqueued]:
        return outbox.on(connection).enqueue_fanout(*asked.call, content={"of": asked.key}, max_attempts=10_000)

    return fan_out


def _async_enlist(outbox: Outbox, connection: AsyncConnection) -> Enlist:
    return Enlist(
        lambda messages: outbox.on(connection).enqueue_many(messages),
        lambda asked: outbox.on(connection).enqueue_fanout(*asked.call, content={"of": asked.key}, max_attempts=10_000),
    )


def psycopg_async(outbox: Outbox, dsn: str) -> Transaction:
    """Use psycopg's async connection."""

    @contextlib.asynccontextmanager
    async def transaction() -> AsyncIterator[Enlist]:
        async with await psycopg.AsyncConnection.connect(dsn, connect_timeout=5) as connection:
            yield _async_enlist(outbox, connection)

    return transaction


def sqlalchemy_sync(outbox: Outbox, dsn: str) -> Transaction:
    """Use SQLAlchemy's connection from a pool, which may return a dead connection."""
    engine = sqlalchemy.create_engine(make_url(dsn).set(drivername="postgresql+psycopg"))

    @contextlib.asynccontextmanager
    async def transaction() -> AsyncIterator[Enlist]:
        with engine.begin() as connection:

            async def enqueue(messages: list[NewMessage[Any]]) -> Sequence[Enqueued]:
                return outbox.on(connection).enqueue_many(messages)

            yield Enlist(enqueue, _fan_out(outbox, connection))

    return transaction


def sqlalchemy_asyncpg(outbox: Outbox, dsn: str) -> Transaction:
    """Use SQLAlchemy's async connection over asyncpg."""
    engine = create_async_engine(make_url(dsn).set(drivername="postgresql+asyncpg"))

    @contextlib.asynccontextmanager
    async def transaction() -> AsyncIterator[Enlist]:
        async with engine.begin() as connection:
            yield _async_enlist(outbox, connection)

    return transaction


def asyncpg_alone(outbox: Outbox, dsn: str) -> Transaction:
    """Use asyncpg's own connection."""

    @contextlib.asynccontextmanager
    async def transaction() -> AsyncIterator[Enlist]:
        connection = await asyncpg.connect(dsn, timeout=5)
        try:
            async with connection.transaction():
                yield _async_enlist(outbox, connection)
        finally:
            connection.terminate()

    return transaction


DRIVERS: Final[dict[str, Callable[[Outbox, str], Transaction]]] = {
    "psycopg": psycopg_sync,
    "psycopg-async": psycopg_async,
    "sqlalchemy": sqlalchemy_sync,
    "sqlalchemy-asyncpg": sqlalchemy_asyncpg,
    "asyncpg": asyncpg_alone,
}


async def main(driver: str, seed: int) -> None:
    """Produce until SIGTERM."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    outbox = Outbox()
    transaction = DRIVERS[driver](outbox, outbox.settings.require_dsn())
    await produce(transaction, random.Random(seed), told_ledger(), stop)


if __name__ == "__main__":
    logging.basicConfig(format="%(asctime)s %(process)d %(message)s")
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
