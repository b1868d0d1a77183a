"""Polling for the effect of another process or session, which sets no event here."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final, TypeVar

from tests.support.outbox_actions import PATIENCE_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable

PROCESS_PATIENCE_SECONDS: Final = 60.0
_PAUSE_SECONDS: Final = 0.01

T = TypeVar("T")


def wait_until(condition: Callable[[], T], what: Callable[[], str]) -> T:
    """Return the condition's value once it is true. Fail with the text of `what` if that never happens."""
    deadline = time.monotonic() + PROCESS_PATIENCE_SECONDS
    while not (answer := condition()):
        assert time.monotonic() < deadline, f"not within {PROCESS_PATIENCE_SECONDS:g} s: {what()}"
        time.sleep(_PAUSE_SECONDS)
    return answer


async def until(condition: Callable[[], object]) -> None:
    """Poll like `wait_until` on the event loop, for the effect of a session."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not condition():  # noqa: ASYNC110 - the condition is another session's, which sets no event
            await asyncio.sleep(_PAUSE_SECONDS)
