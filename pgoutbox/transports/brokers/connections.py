"""A connection that all sends of a transport share, opened by the first one."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

C = TypeVar("C")


class SharedConnection(Generic[C]):
    """A connection that is opened when it is needed, and replaced when the next send finds it closed.

    Concurrent sends share one attempt to open it, so that an unavailable broker costs each of them one time limit, and
    not one after another. It never reconnects by itself: data that a client has buffered for a lost connection must not
    be sent after the send was reported as failed.
    """

    def __init__(self, connect: Callable[[], Awaitable[C]], is_open: Callable[[C], bool]) -> None:
        self._connect = connect
        self._is_open = is_open
        self._opening: asyncio.Future[C] | None = None

    async def get(self) -> C:
        """Return the open connection. Raises the error of opening it."""
        if self._opening is None or self._has_ended(self._opening):
            self._opening = asyncio.ensure_future(self._connect())
            self._opening.add_done_callback(_note_error)
        # A cancelled caller leaves the attempt to the others.
        return await asyncio.shield(self._opening)

    async def take(self) -> C | None:
        """Return the connection, if one is open, to be closed by the caller."""
        opening, self._opening = self._opening, None
        if opening is None:
            return None
        if not opening.done():
            opening.cancel()
            await asyncio.wait([opening])
        if opening.cancelled() or opening.exception() is not None:
            return None
        return opening.result()

    def _has_ended(self, opening: asyncio.Future[C]) -> bool:
        if not opening.done():
            return False
        return opening.cancelled() or opening.exception() is not None or not self._is_open(opening.result())


def _note_error(opening: asyncio.Future[C]) -> None:
    """Retrieve the error: if all waiting callers were cancelled, nothing else does."""
    if not opening.cancelled():
        opening.exception()
