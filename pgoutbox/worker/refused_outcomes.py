"""Outcomes that PostgreSQL refuses to write.

A trigger, a constraint or a missing right can refuse the outcome of a message that was handed over. The worker keeps
such a message in flight. So its lease is renewed, no worker hands it over again, and the outcome is written again with
growing pauses. With many kept outcomes the worker claims nothing until one of them is written.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from pgoutbox.database.store import FinishRequest
from pgoutbox.observability.events import LogEvent, Telemetry
from pgoutbox.worker.attempt import Attempt
from pgoutbox.worker.backoff import Backoff

_MAX_KEPT: Final = 10  # If the process is killed, these are handed over again.


@dataclass(slots=True)
class RefusedOutcome:
    """The outcome of one attempt that the database refuses: `request`, or sent if it is None."""

    request: FinishRequest | None
    reason: str
    backoff: Backoff = field(default_factory=lambda: Backoff(1.0, 15.0))
    timer: asyncio.TimerHandle | None = None


class RefusedOutcomes:
    """The refused outcomes of one worker. `write_again` is called when it is time to try one again.

    Used on the event loop only.
    """

    def __init__(self, *, write_again: Callable[[Attempt], None], telemetry: Telemetry) -> None:
        self._write_again = write_again
        self._telemetry = telemetry
        self._kept: dict[Attempt, RefusedOutcome] = {}

    @property
    def count(self) -> int:
        """The number of kept outcomes."""
        return len(self._kept)

    @property
    def are_many(self) -> bool:
        """Whether so many outcomes are kept that the worker must claim nothing more."""
        return len(self._kept) >= _MAX_KEPT

    def __contains__(self, attempt: Attempt) -> bool:
        """Whether the outcome of this attempt is kept."""
        return attempt in self._kept

    def finish_request_of(self, attempt: Attempt) -> FinishRequest | None:
        """Return the kept finish request, None if sent."""
        return self._kept[attempt].request

    def note(self, attempt: Attempt, request: FinishRequest | None, error: BaseException) -> None:
        """Keep a refused outcome. It may be kept already."""
        message = attempt.message
        reason = getattr(error, "sqlstate", None) or type(error).__name__
        refusal = self._kept.get(attempt)
        if refusal is None:
            self._kept[attempt] = refusal = RefusedOutcome(request, reason)
            self._telemetry.report(
                logging.ERROR,
                LogEvent.FINISH_REFUSED,
                "the database refused the outcome; it is kept and written again",
                message_id=message.id,
                topic=message.topic,
                queue=message.queue,
                attempt_count=message.attempt_count,
                reason=reason,
            )
        else:
            refusal.reason = reason
        self.wait(attempt)

    def wait(self, attempt: Attempt) -> None:
        """Write a kept outcome again after its pause."""
        refusal = self._kept[attempt]
        if refusal.timer is None:
            refusal.timer = asyncio.get_running_loop().call_later(refusal.backoff.next(), self._try, attempt)

    def forget(self, attempts: Iterable[Attempt]) -> None:
        """Forget the outcomes of these attempts: they are written, or other attempts own the messages."""
        if not self._kept:
            return
        for attempt in attempts:
            refusal = self._kept.pop(attempt, None)
            if refusal is not None and refusal.timer is not None:
                refusal.timer.cancel()

    def stop(self) -> dict[Attempt, RefusedOutcome]:
        """Stop trying again. Return the kept outcomes."""
        for refusal in self._kept.values():
            if refusal.timer is not None:
                refusal.timer.cancel()
        return dict(self._kept)

    def _try(self, attempt: Attempt) -> None:
        self._kept[attempt].timer = None
        self._write_again(attempt)
