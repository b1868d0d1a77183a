"""Turns of fair keys: before a claim, those messages that get their turn are made ready for it.

A message with a fair key waits in a lane that no claim reads. The database gives the turns, so that limits hold
for all workers together. Queues without such messages pay nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple, cast

from pgoutbox.database import sql
from pgoutbox.kernel import seams, statements
from pgoutbox.kernel.seams import Row, Step
from pgoutbox.worker.run_state import RunState

# An end in another worker may free a turn, and nobody tells. Many keys at their limit are read in pages.
_LOOK_SECONDS: Final = (0.02, 1.0)


class _Answer(NamedTuple):
    queue: str
    admitted_count: int
    is_waiting: bool
    cut_at: str | None
    permit_seconds: float | None


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

    async def _give_turns(self, queues: Sequence[str], parameters: Mapping[str, object]) -> None:
        answers = await self._ask(queues, parameters)
        is_vain = not any(one.admitted_count for one in answers)
        for one in answers:
            if is_vain and one.cut_at is not None and not self._run.in_flight:
                is_vain = not await self._finish_round(one.queue, one.cut_at, parameters)
        waiting = {one.queue for one in answers if one.is_waiting}
        self._run.waiting_queues = self._run.waiting_queues.difference(queues) | waiting
        shortest, longest = _LOOK_SECONDS
        self._pause_seconds = min(2 * self._pause_seconds, longest) if is_vain else shortest
        if waiting and self._timer is None:
            permits = [one.permit_seconds for one in answers if one.permit_seconds is not None]
            wait_seconds = max(0.0, min([self._pause_seconds, *permits]))
            self._timer = asyncio.get_running_loop().call_later(wait_seconds, self._look)

    async def _finish_round(self, queue: str, first_key: str, parameters: Mapping[str, object]) -> bool:
        """Read the other keys of a queue. Return whether one got a turn: a worker without work might rest, or end."""
        last_key, has_wrapped = first_key, False
        while not (has_wrapped and last_key >= first_key):
            (answer,) = await self._ask([queue], parameters)
            if answer.admitted_count or answer.cut_at is None:
                return answer.admitted_count > 0
            has_wrapped |= answer.cut_at <= last_key  # The database compares keys by their code points too.
            last_key = answer.cut_at
        return False

    async def _ask(self, queues: Sequence[str], parameters: Mapping[str, object]) -> list[_Answer]:
        (rows,) = await self._run.store.claims.trip([(sql.GIVE_TURNS, {"queues": queues, **parameters})])
        return [_Answer(*row) for row in rows]

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
