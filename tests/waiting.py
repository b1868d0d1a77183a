"""Waiting for what another process or session does, which sets no event here: look, and look again."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final, TypeVar

from tests.outbox_actions import PATIENCE_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable

PROCESS_PATIENCE_SECONDS: Final = 60.0
_PAUSE_SECONDS: Final = 0.01

T = TypeVar("T")


def wait_until(condition: Callable[[], T], what: Callable[[], str]) -> T:
    """What the condition gives, when it holds; fail with the answer of `what` if that never comes."""
    deadline = time.monotonic() + PROCESS_PATIENCE_SECONDS
    while not (answer := condition()):
        assert time.monotonic() < deadline, f"not within {PROCESS_PATIENCE_SECONDS:g} s: {what()}"
        time.sleep(_PAUSE_SECONDS)
    return answer


async def until(condition: Callable[[], object]) -> None:
    """The same on the event loop, for what a session does."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not condition():  # noqa: ASYNC110 - the condition is another session's, which sets no event
            await asyncio.sleep(_PAUSE_SECONDS)
