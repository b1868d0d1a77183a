"""The bulkhead: it limits the slots of each destination, so that a stalled one does not occupy all until its timeout.

Each destination gets up to three times as many slots as are free of sends. A single one gets three quarters, and one
slot is always left for others. A destination that uses its share and answers nothing for a second is stalled.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

_SHARE = 3
_STALL_SECONDS = 1.0
# The time for an answer to reach its task. After a blocked event loop, answers may have arrived unread.
_RETURN_SECONDS = 0.1

T = TypeVar("T")


@dataclass(slots=True)
class Bulkhead:
    """The slots of one worker."""

    free_count: float
    clock: Callable[[], float]


@dataclass(slots=True, eq=False)
class Room:
    """The sends to one destination. `answered_at` is the time of its last answer, or of the first send after a rest."""

    _bulkhead: Bulkhead
    answered_at: float = 0.0
    in_flight_count: int = 0
    waiting_count: int = 0
    _silent_since: float | None = None  # The `answered_at` of the silence that has proved to be one.
    _answered: asyncio.Event = field(default_factory=asyncio.Event)
    _will_tell: bool = False

    @property
    def is_in_use(self) -> bool:
        return bool(self.in_flight_count or self.waiting_count)

    @property
    def is_full(self) -> bool:
        return self.in_flight_count >= _SHARE * self._bulkhead.free_count

    @property
    def is_stalled(self) -> bool:
        """Whether it is stalled by the clock: `proves_stalled` reads the answers that have arrived."""
        return self.is_full and self._bulkhead.clock() >= self.answered_at + _STALL_SECONDS

    async def proves_stalled(self) -> bool:
        """Return whether it is still stalled after the time of an answer's way to its task. It waits once a silence."""
        silent_since = self.answered_at
        if self.is_stalled and self._silent_since != silent_since:
            await self._wait(_RETURN_SECONDS)
            self._silent_since = silent_since
        return self.is_stalled

    async def wait(self) -> None:
        """Wait until there is room, by an answer of this destination, or until it is stalled."""
        if self.is_full:
            await self._wait(self.answered_at + _STALL_SECONDS - self._bulkhead.clock())

    async def _wait(self, seconds: float) -> None:
        self._answered.clear()
        self.waiting_count += 1
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._answered.wait()
        finally:
            self.waiting_count -= 1

    async def use(self, send: Callable[[], Awaitable[T]]) -> T:
        """Send in one slot."""
        if not self.in_flight_count:
            self.answered_at = self._bulkhead.clock()
        self.in_flight_count += 1
        self._bulkhead.free_count -= 1
        try:
            return await send()
        finally:
            self.in_flight_count -= 1
            self._bulkhead.free_count += 1
            self.answered_at = self._bulkhead.clock()
            if self.waiting_count and not self._will_tell:
                # Not at once: the slot of this send may first use the room for its next message, which costs no wait.
                self._will_tell = True
                asyncio.get_running_loop().call_soon(self._tell_waiting)

    def _tell_waiting(self) -> None:
        self._will_tell = False
        if not self.is_full:
            self._answered.set()
