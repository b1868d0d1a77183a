"""One circuit breaker, as this process knows it: a state machine without I/O and without a clock.

Closed: messages are sent, and failures are counted. Open: messages wait until `retry_at`. Half-open, after that: a
message may ask the database for a probe, one at a time. Times come from the caller's clock.

A doubtful failure may be the fault of its recipient alone. Recipients that failed since the last success are
suspects: several of them are not all at fault. While there are few, another recipient may probe at once. A suspect
becomes an outlier when another recipient succeeds: the failures of an outlier are its own, until it succeeds too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, NamedTuple

from pgoutbox.message import Outcome, SendFailure, Transient, Unavailable

WINDOW_SECONDS = 60.0
_WINDOW_MIN_COUNT = 20
_MIN_PAUSE_SECONDS = 0.05
_MAX_PAUSE_SECONDS = 10.0
_SUSPECT_LIMIT = 3
_MAX_REMEMBERED_COUNT = 1_000


class BreakerRow(NamedTuple):
    """An open breaker in the database. `retry_seconds` is not positive when it may be probed.

    `opened`: this statement opened it. `probe_id`: this statement granted a probe.
    """

    retry_seconds: float
    cooldown_seconds: float
    last_error: str
    opened: bool
    probe_id: str | None


@dataclass(slots=True, eq=False)
class CircuitBreaker:
    """The breaker of one key. `retry_at` is set while it is not closed.

    The breaker of a part, such as a sender, opens only by outcomes with its key. Others count for the transport.
    """

    key: str
    failure_limit: int
    error_rate: float
    is_part: bool = False
    error: str = ""
    retry_at: float | None = None
    paused_at: float = 0.0
    pause_seconds: float = _MIN_PAUSE_SECONDS
    is_probing: bool = False
    """Whether a message of this process probes it, or asks for a probe."""
    failure_count: int = 0
    suspects: set[str] = field(default_factory=set)
    outliers: set[str] = field(default_factory=set)
    is_in_doubt: bool = False
    """Whether one recipient may be at fault, so that another one may probe at once."""
    _window_began_at: float = 0.0
    _window_sent_count: int = 0
    _window_failed_count: int = 0

    @property
    def is_closed(self) -> bool:
        return self.retry_at is None

    def is_paused(self, now: float) -> bool:
        """Whether it is open and not half-open."""
        return self.retry_at is not None and now < self.retry_at

    def holds(self, now: float, recipient: str | None) -> bool:
        """Whether a message for this recipient must wait. If it need not, and the breaker is open, it may probe."""
        if self.retry_at is None:
            return False
        return self.is_probing or now < self._probe_at(self.retry_at, recipient)

    def _probe_at(self, retry_at: float, recipient: str | None) -> float:
        """Return when this recipient may probe: a suspect later than others, which may settle a doubt at once."""
        if recipient is None:
            return retry_at
        if digest_of(recipient) in self.suspects:
            return retry_at + self.pause_seconds
        return self.paused_at if self.is_in_doubt else retry_at

    def failure_of(self, outcome: Outcome) -> SendFailure | Unavailable | None:
        """Return the outcome if it is a failure of this breaker's transport, host or part."""
        match outcome:
            case Unavailable(doubtful=str(one)) | SendFailure(doubtful=str(one)) if digest_of(one) in self.outliers:
                return None
            case Unavailable(breaker=key) | SendFailure(outage=True, breaker=key) if key == self.key or (
                key is None and not self.is_part
            ):
                return outcome
            case _:
                return None

    def own_failure(self, outcome: Outcome) -> Outcome:
        """Return the fault of an outlier as a failure that uses up an attempt, and any other outcome as it is."""
        match outcome:
            case Unavailable(doubtful=str(one)) if digest_of(one) in self.outliers:
                return Transient(outcome.error, outcome.retry_after)
            case _:
                return outcome

    def record_success(self, recipient: str) -> None:
        self.failure_count = 0
        self._window_sent_count += 1
        if self.suspects or self.outliers:
            known = self.outliers if len(self.outliers) < _MAX_REMEMBERED_COUNT else set()
            self.outliers = (known | self.suspects) - {digest_of(recipient)}
            self.suspects = set()

    def record_failure(self, failure: SendFailure | Unavailable, now: float) -> bool:
        """Count a failure. Return whether it opens the breaker."""
        if failure.doubtful is not None and len(self.suspects) < _MAX_REMEMBERED_COUNT:
            self.suspects.add(digest_of(failure.doubtful))
        self.is_in_doubt = failure.doubtful is not None and len(self.suspects) < _SUSPECT_LIMIT
        if isinstance(failure, Unavailable) and not failure.outage:
            return True
        if failure.doubtful is not None:
            return len(self.suspects) >= _SUSPECT_LIMIT
        if now - self._window_began_at > WINDOW_SECONDS:
            self._window_began_at = now
            self._window_sent_count = self._window_failed_count = 0
        self.failure_count += 1
        self._window_failed_count += 1
        count = self._window_sent_count + self._window_failed_count
        return self.failure_count >= self.failure_limit or (
            count >= _WINDOW_MIN_COUNT and self._window_failed_count >= self.error_rate * count
        )

    def open(self, row: BreakerRow, now: float) -> None:
        """Pause until the row's retry time; only briefly if it has passed and another worker probes."""
        self.pause_seconds = min(max(row.cooldown_seconds / 10, _MIN_PAUSE_SECONDS), _MAX_PAUSE_SECONDS)
        self.error = row.last_error
        self.pause(now, row.retry_seconds)

    def pause(self, now: float, seconds: float = 0.0) -> None:
        self.paused_at = now
        self.retry_at = now + (seconds if seconds > 0 else self.pause_seconds)

    def close(self) -> None:
        self.retry_at = None
        self.failure_count = self._window_sent_count = self._window_failed_count = 0

    def refresh(self, row: BreakerRow | None, *, asked_at: float, now: float) -> None:
        """Take over the row as it was at `asked_at`, unless the state has changed since then."""
        if self.retry_at is None or self.paused_at > asked_at:
            return
        if row is None:
            self.close()
        else:
            self.open(row, now)

    def wait_seconds(self, now: float, recipient: str | None = None) -> float:
        """Return the time until the next probe; while one is in progress, the pause between two looks."""
        probe_at = now if self.retry_at is None else self._probe_at(self.retry_at, recipient)
        return probe_at - now if now < probe_at else self.pause_seconds

    def memory(self) -> dict[str, Any]:
        """Return the facts that the next run continues with."""
        facts = {"failures": self.failure_count, "suspects": [*self.suspects], "outliers": [*self.outliers]}
        return {name: fact for name, fact in facts.items() if fact}

    def remember(self, failures: int = 0, suspects: Sequence[str] = (), outliers: Sequence[str] = ()) -> None:
        """Continue with the `memory` of the last run."""
        self.failure_count, self.suspects, self.outliers = failures, set(suspects), set(outliers)

    def is_forgettable(self, now: float) -> bool:
        """Whether it is like a new one."""
        return (
            self.retry_at is None
            and not (self.failure_count or self.suspects or self.outliers)
            and (not self._window_failed_count or now - self._window_began_at > WINDOW_SECONDS)
        )


def digest_of(recipient: str) -> str:
    """Return a digest that is so short that it identifies nobody: the database stores it between runs."""
    return blake2b(recipient.encode(), digest_size=2).hexdigest()
