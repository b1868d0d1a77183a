"""Tests the shared connection of all sends: opened once for concurrent callers, and reopened after it has ended."""

from __future__ import annotations

import asyncio
import gc
from dataclasses import dataclass, field

import pytest

from pgoutbox.transports.brokers.broker import SharedConnection


@dataclass
class WorkerConnection:
    is_open: bool = True


@dataclass
class Server:
    """Opens links when the test allows it, and records each attempt."""

    was_asked: asyncio.Event = field(default_factory=asyncio.Event)
    may_answer: asyncio.Event = field(default_factory=asyncio.Event)
    links: list[WorkerConnection] = field(default_factory=list)
    attempt_count: int = 0
    error: Exception | None = None

    async def connect(self) -> WorkerConnection:
        self.attempt_count += 1
        self.was_asked.set()
        await self.may_answer.wait()
        if self.error is not None:
            raise self.error
        self.links.append(WorkerConnection())
        return self.links[-1]

    def shared(self) -> SharedConnection[WorkerConnection]:
        return SharedConnection(self.connect, lambda link: link.is_open)


async def test_concurrent_callers_share_one_attempt_and_one_connection() -> None:
    server = Server()
    shared = server.shared()
    waiting = [asyncio.create_task(shared.get()) for _ in range(10)]
    await server.was_asked.wait()
    server.may_answer.set()
    assert len({id(link) for link in await asyncio.gather(*waiting)}) == 1
    assert server.attempt_count == 1


async def test_a_cancelled_caller_leaves_the_attempt_to_the_others() -> None:
    server = Server()
    shared = server.shared()
    first, second = asyncio.create_task(shared.get()), asyncio.create_task(shared.get())
    await server.was_asked.wait()
    first.cancel()
    await asyncio.wait([first])
    server.may_answer.set()
    assert await second is server.links[0]
    assert (first.cancelled(), server.attempt_count) == (True, 1)


async def test_an_ended_connection_is_replaced() -> None:
    server = Server()
    server.may_answer.set()
    shared = server.shared()
    assert await shared.get() is await shared.get()
    server.links[0].is_open = False
    assert await shared.get() is server.links[1]


async def test_a_failed_attempt_fails_for_all_callers_and_the_next_call_retries() -> None:
    server = Server(error=OSError("away"))
    shared = server.shared()
    waiting = [asyncio.create_task(shared.get()) for _ in range(3)]
    await server.was_asked.wait()
    server.may_answer.set()
    assert [str(error) for error in await asyncio.gather(*waiting, return_exceptions=True)] == ["away"] * 3
    server.error = None
    assert await shared.get() is server.links[0]
    assert server.attempt_count == 2


async def test_an_error_without_a_waiting_caller_is_not_reported_as_lost() -> None:
    reported: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    server = Server(error=OSError("away"))
    shared = server.shared()
    waiting = asyncio.create_task(shared.get())
    await server.was_asked.wait()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    (attempt,) = asyncio.all_tasks() - {asyncio.current_task()}
    server.may_answer.set()
    await asyncio.wait([attempt])
    del attempt, shared, waiting
    gc.collect()  # An unread error is reported when its task is deleted.
    assert reported == []


async def test_taking_the_connection_cancels_a_running_attempt() -> None:
    server = Server()
    shared = server.shared()
    assert await shared.take() is None
    waiting = asyncio.create_task(shared.get())
    await server.was_asked.wait()
    assert await shared.take() is None
    with pytest.raises(asyncio.CancelledError):
        await waiting
    server.may_answer.set()
    link = await shared.get()
    assert await shared.take() is link
    assert await shared.take() is None
