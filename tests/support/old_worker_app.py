"""The application of the fault tests for a worker process that suspends itself right after a claim.

No public name lets a process stop at this moment, so it replaces an inner part of the worker.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pgoutbox.worker.run
from pgoutbox.database.store import Store
from tests.support.fleet_app import outbox, suspend

if TYPE_CHECKING:
    from pgoutbox.database.store import ClaimedRow

__all__ = ["outbox"]


class SuspendedStore(Store):
    """Suspends the process between the claim and the next step."""

    async def claim(self, *arguments: Any, **options: Any) -> list[ClaimedRow]:  # noqa: ANN401 - passed on
        """Claim, then suspend the process while it holds the rows."""
        rows = await super().claim(*arguments, **options)
        if rows:
            suspend()
        return rows


vars(pgoutbox.worker.run)["Store"] = SuspendedStore
