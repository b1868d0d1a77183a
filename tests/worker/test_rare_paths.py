"""Tests guarantees and controls on rarely used paths: batches, rings, shutdowns, drains."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import psycopg
import pytest

from pgoutbox import Context, Message, Outbox, RetryPolicy, Sent, Transient
from pgoutbox.clock import elapsed_clock
from pgoutbox.message import State
from pgoutbox.operations import Operator, Rate
from pgoutbox.worker import Worker
from tests.support.line_server import Line, LineTransport, Mood, line_host
from tests.support.outbox_actions import (
    attempts_of,
    cancel,
    drained,
    enqueue,
    expire,
    lapse,
    rows_of,
    running,
    settings_for,
    state_of,
)
from tests.support.waiting import until, until_idle, until_polled
from tests.support.worker_sql import claim, run_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pgoutbox.handlers import OnUnknown
    from pgoutbox.message import Outcome

pytestmark = pytest.mark.slow


def quick(dsn: str, *topics: str, **settings: object) -> Outbox:
    """Build an outbox whose handlers send immediately."""
    outbox = Outbox(settings_for(dsn, **settings))
    for topic in topics or ("greet",):

        @outbox.handler(topic)
        async def send(message: Message, ctx: Context) -> None: ...

    return outbox


# --- stopped handlers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("on_unknown", "ends"), [("hold", State.FAILED), ("retry", State.SENDING)])
async def test_a_message_whose_handler_outlives_the_worker_waits_for_the_end_of_its_lease(
    dsn: str, db: psycopg.Connection, on_unknown: OnUnknown, ends: State
) -> None:
    """Another message of its claim ends before it."""
    outbox = Outbox(settings_for(dsn, shutdown_grace_seconds=0))
    has_begun, may_end = asyncio.Event(), asyncio.Event()

    @outbox.handler("greet", on_unknown=on_unknown)
    async def greet(message: Message, ctx: Context) -> None:
        if message.id == sent_id:
            return
        has_begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            await may_end.wait()

    with db.transaction():
        message_id, sent_id = enqueue(db), enqueue(db)
    try:
        async with running(Worker(outbox)):
            await has_begun.wait()
            await until(lambda: state_of(db, sent_id) == State.SENT)
    finally:
        may_end.set()
    hold_topics = ["greet"] if on_unknown == "hold" else []
    assert claim(db, hold_topics=hold_topics) == []
    lapse(db, message_id)
    assert [row.state for row in claim(db, hold_topics=hold_topics)] == [ends]


async def test_a_timed_out_batch_is_held_if_its_handler_requests_it(dsn: str, db: psycopg.Connection) -> None:
    outbox = Outbox(settings_for(dsn))

    @outbox.batch_handler("greet", on_unknown="hold", timeout=0.1)
    async def greet(messages: Sequence[Message], contexts: Sequence[Context]) -> None:
        await asyncio.Event().wait()

    with db.transaction():
        ids = [enqueue(db) for _ in range(2)]
    await Worker(outbox).run_once()
    assert {row.state for row in rows_of(db, *ids)} == {"failed"}


@pytest.mark.parametrize("on_unknown", ["retry", "hold"])
async def test_a_message_held_back_by_a_breaker_keeps_its_attempt_if_its_batch_times_out(
    dsn: str, db: psycopg.Connection, on_unknown: str
) -> None:
    settings = settings_for(dsn, breaker_failures=1, breaker_cooldown_seconds=3600, breaker_max_cooldown_seconds=7200)
    outbox = Outbox(settings, transports=[LineTransport(timeout_seconds=60)])
    hangs = False

    @outbox.batch_handler("greet", retry=RetryPolicy.steps(3600), timeout=0.5, on_unknown=on_unknown)  # type: ignore[arg-type]
    async def greet(messages: Sequence[Message], contexts: Sequence[Context]) -> list[Outcome | Line]:
        if hangs:
            await asyncio.Event().wait()
        return [Line(str(message.id)) for message in messages]

    async with line_host(Mood.DROP) as dead, line_host() as alive, running(Worker(outbox)):
        opener = enqueue(db, destination=dead.destination)
        await until(lambda: [outcome for _, outcome, _ in attempts_of(db, opener)] == ["snoozed"])
        hangs = True
        with db.transaction():
            held_back = enqueue(db, destination=dead.destination)
            other = enqueue(db, destination=alive.destination)
        await until(
            lambda: all(row.attempt_count == 1 and row.state != "sending" for row in rows_of(db, held_back, other))
        )
    assert [outcome for _, outcome, _ in attempts_of(db, held_back)] == ["snoozed"]
    assert [outcome for _, outcome, _ in attempts_of(db, other)] == ["retry" if on_unknown == "retry" else "failed"]


@pytest.mark.parametrize("how", ["cancelled", "superseded"])
async def test_an_overtaken_message_is_not_failed_by_the_handlers_permanent_list(
    dsn: str, db: psycopg.Connection, how: str
) -> None:
    outbox = Outbox(settings_for(dsn))

    @outbox.handler("greet", permanent=[Exception])
    async def greet(message: Message, ctx: Context) -> None:
        if message.payload == "newer":
            return
        if how == "cancelled":
            assert cancel(db, message.id) == "requested"
        else:
            enqueue(db, payload="newer", coalesce_key="k")
        await ctx.ensure_lease()

    message_id = enqueue(db, coalesce_key="k")
    await Worker(outbox).run_once()
    assert state_of(db, message_id) == {"cancelled": "cancelled", "superseded": "skipped"}[how]


# --- expiry -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [False, True], ids=["one by one", "batch"])
async def test_a_message_that_expires_while_it_waits_for_a_slot_is_not_handed_over(
    dsn: str, db: psycopg.Connection, batch: bool
) -> None:
    outbox = Outbox(settings_for(dsn, concurrency=1))
    later = datetime.now(UTC) + timedelta(hours=1)
    seen: list[object] = []
    are_claimed = False

    @outbox.handler("slow")
    async def slow(message: Message, ctx: Context) -> None:
        nonlocal are_claimed
        await until(lambda: {row.state for row in rows_of(db, *brief)} == {"sending"})
        are_claimed = True
        for message_id in brief:
            expire(db, message_id)
            run_of(worker).state.in_flight[message_id].expiring_at = elapsed_clock()

    if batch:

        @outbox.batch_handler("greet")
        async def greet_many(messages: Sequence[Message], contexts: Sequence[Context]) -> None:
            seen.extend(message.payload for message in messages)

    else:

        @outbox.handler("greet")
        async def greet(message: Message, ctx: Context) -> None:
            seen.append(message.payload)

    worker = Worker(outbox)
    with db.transaction():
        enqueue(db, "slow")
        brief = [enqueue(db, payload="brief", expires_at=later) for _ in range(3)]
        lasting = enqueue(db, payload="lasting", expires_at=later)

    await worker.drain()
    assert are_claimed
    assert seen == ["lasting"]
    assert {(row.state, row.skip_reason) for row in rows_of(db, *brief)} == {("skipped", "expired")}
    assert state_of(db, lasting) == "sent"


async def test_a_lost_attempt_in_an_unserved_queue_does_not_block_the_newest_message(
    dsn: str, db: psycopg.Connection
) -> None:
    older = enqueue(db, coalesce_key="k", queue="decommissioned")
    other = enqueue(db, coalesce_key="other", queue="decommissioned", max_attempts=1)
    foreign = [enqueue(db, "bill", coalesce_key="k", queue=queue) for queue in ("decommissioned", "default")]
    claim(db, queue="decommissioned", topics=["greet"], worker="gone")
    db.execute("DELETE FROM pgoutbox.key_head WHERE scope = 'bill'")
    claim(db, queue="decommissioned", topics=["bill"], worker="gone")
    newer = enqueue(db, coalesce_key="k")
    await Worker(quick(dsn)).run_once()
    assert [row.state for row in rows_of(db, older, newer)] == ["sending", "pending"]
    for message_id in (older, other, foreign[0]):
        lapse(db, message_id)
    await Worker(quick(dsn)).run_once()
    assert [(row.state, row.superseded_by) for row in rows_of(db, older, newer)] == [("skipped", newer), ("sent", None)]
    assert [(number, outcome) for number, outcome, _ in attempts_of(db, older)] == [(1, "lost")]
    # These wait for their own workers: a message that is not superseded, and messages of other topics.
    assert [row.state for row in rows_of(db, other, *foreign)] == ["sending", "sending", "pending"]


# --- rings ------------------------------------------------------------------------------------------------------------


async def test_a_pause_whose_end_is_moved_forward_ends_at_the_new_time(dsn: str, db: psycopg.Connection) -> None:
    Operator(db).pause("default")
    message_id = enqueue(db)
    worker = Worker(quick(dsn))
    async with running(worker):
        await until_idle(worker)
        Operator(db).pause("default", duration=timedelta(milliseconds=100))
        await until(lambda: state_of(db, message_id) == "sent")


async def test_removing_a_rate_wakes_a_worker_that_sleeps_until_the_next_token(
    dsn: str, db: psycopg.Connection
) -> None:
    Operator(db).limit_rate("default", Rate(1, 3600), burst=1)
    db.execute("UPDATE pgoutbox.queue SET tokens = 0, tokens_at = now()")
    message_id = enqueue(db)
    worker = Worker(quick(dsn))
    async with running(worker):
        await until_idle(worker)
        Operator(db).limit_rate("default", None)
        await until(lambda: state_of(db, message_id) == "sent")


async def test_the_next_message_of_an_ordering_key_follows_a_transactional_handler(
    dsn: str, db: psycopg.Connection
) -> None:
    outbox = Outbox(settings_for(dsn))

    @outbox.handler("greet", transactional=True)
    async def greet(message: Message, ctx: Context) -> None: ...

    async with running(Worker(outbox)):
        ids = [enqueue(db, ordering_key="k") for _ in range(5)]
        await until(lambda: all(row.state == "sent" for row in rows_of(db, *ids)))


@pytest.mark.parametrize("transactional", [False, True])
async def test_a_message_that_waited_in_another_queue_for_its_predecessor_wakes_its_worker(
    dsn: str, db: psycopg.Connection, transactional: bool
) -> None:
    slow = Outbox(settings_for(dsn, lease_seconds=300))
    has_begun, may_end = asyncio.Event(), asyncio.Event()

    @slow.handler("greet", transactional=transactional)
    async def greet(message: Message, ctx: Context) -> None:
        has_begun.set()
        await may_end.wait()

    enqueue(db, coalesce_key="k", queue="slow")
    other = Worker(quick(dsn))
    async with running(Worker(slow, queues=["slow"])), running(other):
        await has_begun.wait()
        await until_idle(other)
        newer = enqueue(db, coalesce_key="k")
        await until_polled(other, db)
        may_end.set()
        await until(lambda: state_of(db, newer) == "sent")


# --- messages of a stopping worker ------------------------------------------------------------------------------------


class Leaver:
    """A worker that is stopped while it handles the message `first`, which ends within the grace period."""

    def __init__(self, dsn: str, first: Outcome) -> None:
        outbox = Outbox(settings_for(dsn, lease_seconds=300, shutdown_grace_seconds=20))
        self._has_begun, self._may_end = asyncio.Event(), asyncio.Event()

        @outbox.handler("greet", retry=RetryPolicy.steps(0.05, jitter=0))
        async def greet(message: Message, ctx: Context) -> Outcome:
            self._has_begun.set()
            await self._may_end.wait()
            return first

        self.worker = Worker(outbox)

    async def begin(self) -> None:
        """Wait until the message is in its handler."""
        self._working = asyncio.create_task(self.worker.run())
        await self._has_begun.wait()

    async def leave(self) -> None:
        """Stop, end the attempt, and wait for the end of the worker."""
        self.worker.stop()
        self._may_end.set()
        await self._working


@pytest.mark.parametrize("key", ["coalesce_key", "ordering_key"])
async def test_a_stopping_worker_notifies_of_messages_that_waited_for_its_last_one(
    dsn: str, db: psycopg.Connection, key: str
) -> None:
    leaver, stayer = Leaver(dsn, Sent()), Worker(quick(dsn))
    first = enqueue(db, **{key: "k"})  # type: ignore[arg-type] # one of both
    await leaver.begin()
    async with running(stayer):
        await until_idle(stayer)
        second = enqueue(db, **{key: "k"})  # type: ignore[arg-type]
        await until_polled(stayer, db)
        await leaver.leave()
        assert state_of(db, first) == "sent"
        await until(lambda: state_of(db, second) == "sent")


async def test_a_stopping_worker_notifies_of_its_retries(dsn: str, db: psycopg.Connection) -> None:
    leaver, stayer = Leaver(dsn, Transient("busy")), Worker(quick(dsn))
    message_id = enqueue(db)
    await leaver.begin()
    async with running(stayer):
        await until_idle(stayer)
        await leaver.leave()
        await until(lambda: state_of(db, message_id) == "sent")


async def test_a_worker_with_once_notifies_of_its_retries(dsn: str, db: psycopg.Connection) -> None:
    once = Outbox(settings_for(dsn))

    @once.handler("greet", retry=RetryPolicy.steps(0.5, jitter=0))
    async def greet(message: Message, ctx: Context) -> Outcome:
        return Transient("busy")

    stayer = Worker(quick(dsn))
    async with running(stayer):
        await until_idle(stayer)
        message_id = enqueue(db, notify=False)  # So that it is not the first message of the staying worker.
        await Worker(once).run_once()
        await until(lambda: state_of(db, message_id) == "sent")


async def test_a_stopping_worker_releases_its_locks_for_the_remaining_workers(dsn: str, db: psycopg.Connection) -> None:
    # The remaining worker would recheck the bell by itself, but not before the test is over.
    leaver, stayer = (Worker(quick(dsn, listener_heartbeat_seconds=600)) for _ in range(2))
    async with AsyncExitStack() as leaving:
        await leaving.enter_async_context(running(leaver))
        await until_idle(leaver)
        async with running(stayer):
            await until_idle(stayer)
            await leaving.aclose()
            message_id = enqueue(db)
            await until(lambda: state_of(db, message_id) == "sent")


# --- drains -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["scheduled", "of a topic that nobody here knows"])
async def test_a_drain_ignores_messages_that_wait_for_an_ignored_message(
    dsn: str, db: psycopg.Connection, first: str
) -> None:
    if first == "scheduled":
        enqueue(db, ordering_key="k", available_at=datetime.now(UTC) + timedelta(hours=1))
    else:
        enqueue(db, "unknown", ordering_key="k")
    waits = enqueue(db, ordering_key="k")
    free = enqueue(db, ordering_key="another")
    await drained(quick(dsn))
    assert (state_of(db, waits), state_of(db, free)) == ("pending", "sent")


async def test_a_drain_waits_behind_a_retry(dsn: str, db: psycopg.Connection) -> None:
    outbox = Outbox(settings_for(dsn))

    @outbox.handler("greet", retry=RetryPolicy.steps(0.2, jitter=0))
    async def greet(message: Message, ctx: Context) -> Outcome:
        return Transient("busy") if message.attempt_count == 1 else Sent()

    ids = [enqueue(db, ordering_key="k") for _ in range(2)]
    await drained(outbox)
    assert {row.state for row in rows_of(db, *ids)} == {"sent"}


async def test_a_drain_waits_for_the_tokens_of_a_queue_whose_pause_is_over(dsn: str, db: psycopg.Connection) -> None:
    Operator(db).limit_rate("default", Rate(10, 1), burst=1)
    db.execute("UPDATE pgoutbox.queue SET paused_at = now() - interval '1 h', resume_at = now() - interval '1 s'")
    ids = [enqueue(db) for _ in range(3)]
    await drained(quick(dsn))
    assert {row.state for row in rows_of(db, *ids)} == {"sent"}
