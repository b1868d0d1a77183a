"""Turns of fair keys: before a claim, those messages that get their turn are made ready for it.

A message with a fair key waits in a lane that no claim reads. The database gives the turns, so that limits hold
for all workers together. Queues without such messages pay nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final, cast

from pgoutbox.database import sql
from pgoutbox.kernel import seams, statements
from pgoutbox.kernel.seams import Row, Step
from pgoutbox.worker.run_state import RunState

# An end in another worker may free a turn, and nobody tells. Many keys at their limit are read in pages.
_LOOK_SECONDS: Final = (0.02, 1.0)


class FairLink:
    """The connection of the kernel, which gives turns before each claim from a queue with fair keys."""

    def __init__(self, link: seams.Link, run: RunState) -> None:
        self._link = link
        self._run = run
        self._pause_seconds = _LOOK_SECONDS[0]
        self._timer: asyncio.TimerHandle | None = None

    async def trip(self, steps: Sequence[Step]) -> list[list[Row]]:
        """See `Link`."""
        for statement, parameters in steps:
            if statement in (statements.CLAIM, statements.CLAIM_WITHOUT_KEYS):
                served = cast("Sequence[str]", parameters["served"])
                if queues := sorted(self._run.fair_queues.intersection(served)):
                    await self._give_turns(queues, {"topics": parameters["topics"], "total": parameters["total"]})
        return await self._link.trip(steps)

    async def _give_turns(self, queues: Sequence[str], parameters: dict[str, object]) -> None:
        (rows,) = await self._run.store.claims.trip([(sql.GIVE_TURNS, {"queues": queues, **parameters})])
        waiting = {queue for queue, _, is_waiting, _ in rows if is_waiting}
        self._run.waiting_queues = self._run.waiting_queues.difference(queues) | waiting
        shortest, longest = _LOOK_SECONDS
        is_vain = not any(count for _, count, _, _ in rows)
        permits = [seconds for _, _, _, seconds in rows if seconds is not None]
        self._pause_seconds = min(2 * self._pause_seconds, longest) if is_vain else shortest
        if waiting and self._timer is None:
            wait_seconds = max(0.0, min([self._pause_seconds, *permits]))
            self._timer = asyncio.get_running_loop().call_later(wait_seconds, self._look)

    def _look(self) -> None:
        self._timer = None
        for queue in self._run.waiting_queues:
            self._run.kernel.want(queue)

    def abandon(self) -> None:
        """See `Link`."""
        self._link.abandon()

    def refuses(self, error: BaseException) -> bool:
        """See `Link`."""
        return self._link.refuses(error)
