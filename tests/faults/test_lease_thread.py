"""The thread that renews the leases dies: its worker does not go on without renewals."""

from __future__ import annotations

import asyncio
import gc
import resource
from typing import TYPE_CHECKING

import pytest

from pgoutbox import Outbox
from pgoutbox.errors import PgOutboxError
from pgoutbox.handlers import Context
from pgoutbox.lease import LeaseKeeper
from pgoutbox.message import Message
from pgoutbox.worker import Worker
from tests.outbox_actions import PATIENCE_SECONDS, settings_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


# An event loop that asyncio could make only in part complains when it is forgotten.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture
def outbox(dsn: str) -> Outbox:
    """An outbox of a worker that polls."""
    outbox = Outbox(settings_for(dsn, listen=False))

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None:
        """It is sent by that."""

    return outbox


@pytest.fixture
def limits() -> Iterator[tuple[int, int]]:
    """How many files this process may open; as before when the test ends."""
    found = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield found
    resource.setrlimit(resource.RLIMIT_NOFILE, found)
    gc.collect()  # What complains does so in this module.


async def test_a_worker_whose_lease_thread_finds_no_room_for_its_event_loop_ends_with_an_error(
    outbox: Outbox, limits: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    start = LeaseKeeper.start

    def start_without_files(keeper: LeaseKeeper, on_death: Callable[[], None]) -> None:
        def restore() -> None:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            on_death()

        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
        start(keeper, restore)

    monkeypatch.setattr(LeaseKeeper, "start", start_without_files)
    with pytest.raises(PgOutboxError, match=r"leases are not renewed any more.*OSError.*Too many open files"):
        async with asyncio.timeout(PATIENCE_SECONDS):
            await Worker(outbox).run()


async def test_a_worker_whose_lease_thread_dies_in_its_work_ends_with_an_error(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    class MemoryLost(BaseException):
        """Nothing that is expected anywhere."""

    async def die(keeper: LeaseKeeper, link: object) -> None:
        raise MemoryLost("no room")

    monkeypatch.setattr(LeaseKeeper, "_keep_once", die)
    with pytest.raises(PgOutboxError, match=r"leases are not renewed any more.*MemoryLost: no room"):
        async with asyncio.timeout(PATIENCE_SECONDS):
            await Worker(outbox).run()
