"""Claims whose answers were lost: which attempts they may have begun, and when to look for them.

No handler has seen these attempts, so they are released. The outcome of an attempt can get lost as well, by a failover
to a standby that did not hear of it, and that attempt looks alike: its row has the worker's name, and the worker does
not hold it. But its handler has run, so it counts as lost when its lease ends. The server's clock tells the two apart.
The claims of a worker follow one another, so an unanswered one began after the last that was answered before it, and
before the first that was answered after it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import datetime


@dataclass(slots=True)
class Span:
    """Between which claims unanswered ones began, by the server's clock, and when to look for their attempts."""

    after: datetime | None  # None: no claim was answered before.
    before: datetime | None = None  # None: none has been since.
    due_at: float = -math.inf
    was_looked_at: bool = False


class UnansweredClaims:
    """What one worker knows of its unanswered claims. Times without a time zone are seconds of its own clock.

    A server that is slow to commit may do so after the first look for the attempts. So a second one follows.
    """

    def __init__(self, *, again_seconds: float) -> None:
        self._again_seconds = again_seconds
        self._spans: list[Span] = []
        self._answered_at: datetime | None = None
        self._is_waiting = False

    def begin(self) -> None:
        """A claim begins. Until `end` it is taken for unanswered."""
        self._is_waiting = True

    def end(self, claimed_at: datetime | None = None) -> None:
        """It had no effect, or its attempts are known. `claimed_at` is their time of claim, if it began any."""
        self._is_waiting = False
        if claimed_at is not None:
            self._answered_at = claimed_at
            if self._spans and self._spans[-1].before is None:
                self._spans[-1].before = claimed_at

    def due(self, now: float) -> list[Span]:
        """The spans in which to look for attempts now."""
        if self._is_waiting:
            self._is_waiting = False
            if not self._spans or self._spans[-1].before is not None:
                self._spans.append(Span(self._answered_at))
            self._spans[-1].due_at, self._spans[-1].was_looked_at = -math.inf, False
        return [span for span in self._spans if span.due_at <= now]

    def note_looked(self, span: Span, now: float) -> None:
        """A look into this span has ended, which began at `now`."""
        if span.was_looked_at:
            self._spans.remove(span)
        span.due_at, span.was_looked_at = now + self._again_seconds, True
