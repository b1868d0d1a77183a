"""Tests that a worker ends when the thread that renews its leases dies."""

from __future__ import annotations

import asyncio
import gc
import resource
from typing import TYPE_CHECKING

import pytest

from pgoutbox import Outbox
from pgoutbox.errors import PgOutboxError
from pgoutbox.handlers import Context
from pgoutbox.message import Message
from pgoutbox.worker import Worker
from pgoutbox.worker.leases import LeaseKeeper
from tests.support.outbox_actions import PATIENCE_SECONDS, settings_for

if TYPE_CHECKING:
    from collections.abc import Iterator


# A half-built event loop warns when it is garbage-collected.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture
def outbox(dsn: str) -> Outbox:
    """Build an outbox whose worker polls."""
    outbox = Outbox(settings_for(dsn, listen=False))

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None:
        """Do nothing; the message is then sent."""

    return outbox


@pytest.fixture
def limits() -> Iterator[tuple[int, int]]:
    """Limit the number of open files of this process until the test ends."""
    found = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield found
    resource.setrlimit(resource.RLIMIT_NOFILE, found)
    gc.collect()  # Only this module raises the warning.


async def test_a_worker_ends_with_an_error_if_its_lease_thread_cannot_create_an_event_loop(
    outbox: Outbox, limits: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    start = LeaseKeeper.start

    def start_without_files(keeper: LeaseKeeper) -> None:
        stop = keeper._run.stop

        def restore(error: PgOutboxError | None = None) -> None:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            stop(error)

        keeper._run.stop = restore  # type: ignore[method-assign] # the same, with files again
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
        start(keeper)

    monkeypatch.setattr(LeaseKeeper, "start", start_without_files)
    with pytest.raises(PgOutboxError, match=r"leases are no longer renewed.*OSError.*Too many open files"):
        async with asyncio.timeout(PATIENCE_SECONDS):
            await Worker(outbox).run()


async def test_a_worker_ends_with_an_error_if_its_lease_thread_dies(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    class MemoryLost(BaseException):
        """An error that no code expects."""

    async def die(keeper: LeaseKeeper, link: object) -> None:
        raise MemoryLost("no room")

    monkeypatch.setattr(LeaseKeeper, "_keep_once", die)
    with pytest.raises(PgOutboxError, match=r"leases are no longer renewed.*MemoryLost: no room"):
        async with asyncio.timeout(PATIENCE_SECONDS):
            await Worker(outbox).run()
