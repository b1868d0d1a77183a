"""Claims whose answers were lost: the attempts that they may have begun, and the times to search for them.

No handler has seen these attempts, so they are released. The outcome of an attempt can get lost too, by a failover to a
standby without it. The row of such an attempt looks the same: it has the worker's name, and the worker does not hold
it. But its handler has run, so the attempt counts as lost when its lease ends. The server's clock distinguishes the
two. The claims of a worker follow one another. So an unanswered claim began after the last answered claim before it,
and before the first answered claim after it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import datetime


@dataclass(slots=True)
class Span:
    """The span of the server's clock in which unanswered claims began, and the time to search for their attempts."""

    after: datetime | None  # None: no claim was answered before.
    before: datetime | None = None  # None: no claim was answered since.
    due_at: float = -math.inf
    was_searched: bool = False


class UnansweredClaims:
    """The unanswered claims of one worker. Times without a time zone are seconds of its own clock.

    A slow server may commit a claim after the first search for its attempts. So a second search follows.
    """

    def __init__(self, *, again_seconds: float) -> None:
        self._again_seconds = again_seconds
        self._spans: list[Span] = []
        self._answered_at: datetime | None = None
        self._is_waiting = False

    def begin(self) -> None:
        """Remember the begin of a claim. Until `end` it counts as unanswered."""
        self._is_waiting = True

    def end(self, claimed_at: datetime | None = None) -> None:
        """Remember an answered claim: its attempts are known, and have this time of claim, or it began none."""
        self._is_waiting = False
        if claimed_at is not None:
            self._answered_at = claimed_at
            if self._spans and self._spans[-1].before is None:
                self._spans[-1].before = claimed_at

    def due(self, now: float) -> list[Span]:
        """Return the spans in which to search for attempts now."""
        if self._is_waiting:
            self._is_waiting = False
            if not self._spans or self._spans[-1].before is not None:
                self._spans.append(Span(self._answered_at))
            self._spans[-1].due_at, self._spans[-1].was_searched = -math.inf, False
        return [span for span in self._spans if span.due_at <= now]

    def note_searched(self, span: Span, now: float) -> None:
        """Remember a completed search of this span, which began at `now`."""
        if span.was_searched:
            self._spans.remove(span)
        span.due_at, span.was_searched = now + self._again_seconds, True
