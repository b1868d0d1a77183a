"""The application of the fault tests for a worker process that suspends itself right after a claim.

No public name lets a process stop at this moment, so it replaces an inner part of the worker.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pgoutbox.worker.kernel_run import Link
from tests.support.fleet_app import outbox, suspend
from tests.support.worker_sql import has_claimed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pgoutbox.kernel.seams import Row, Step

__all__ = ["outbox"]


trip = Link.trip


async def trip_and_suspend(self: Link, steps: Sequence[Step]) -> list[list[Row]]:
    """Suspend the process while it holds the rows of a claim."""
    results = await trip(self, steps)
    if has_claimed(steps, results):
        suspend()
    return results


Link.trip = trip_and_suspend  # type: ignore[method-assign] # suspends itself, and is otherwise the same
