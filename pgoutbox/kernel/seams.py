"""What the kernel needs from the rest of a worker, as types."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Generic, LiteralString, NamedTuple, Protocol, TypeVar

Row = tuple[Any, ...]
O = TypeVar("O")  # noqa: E741 - the origin of an end
Step = tuple[LiteralString, Mapping[str, object]]


class Link(Protocol):
    """A connection of the worker."""

    async def trip(self, steps: Sequence[Step]) -> list[list[Row]]:
        """Run the statements in one transaction and one round trip, and return the rows of each."""
        ...


class Bell(Protocol):
    """Wakes the worker at the commit of a message, while it holds the lock of the bell."""

    async def hold(self) -> float:
        """Get ready to sleep, and return how many seconds the worker may sleep without being woken.

        Zero means that each later commit wakes it, and that earlier ones may not have: it claims once more.
        """
        ...

    async def release(self) -> None:
        """Producers need not notify a worker that is busy. Other idle workers take over."""
        ...


class Keys(NamedTuple):
    """A message that has a coalesce key or an ordering key: others may wait for its end."""

    id: int
    topic: str
    queue: str
    coalesce_key: str | None
    ordering_key: str | None


# Not frozen: setting the fields of a frozen dataclass takes five times as long.
@dataclass(slots=True)
class Ended(Generic[O]):
    """The end of an attempt, as it is to be written. `origin` is the caller's. Without a key `keys` is None."""

    origin: O
    id: int
    attempt_count: int
    claimed_at: datetime
    keys: Keys | None = None
    outcome: str = "sent"
    reason: str | None = None
    delay_seconds: float = 0.0
    reason_code: str | None = None
    breaker_key: str | None = None
    error_place: str | None = None
    fails_after_seconds: float | None = None


class Attempts(Protocol[O]):
    """The attempts of a worker: it begins those of a claim, and collects their ends."""

    def room(self) -> int:
        """Return how many messages to claim now."""
        ...

    async def begin(self, rows: Sequence[Row], seconds_ago: float) -> None:
        """Begin the attempts of these rows of claim.sql, each with whether it is superseded meanwhile.

        Their claim began `seconds_ago`.
        """
        ...

    def take_ended(self, most: int) -> list[Ended[O]]:
        """Return up to `most` ends that are to be written."""
        ...

    def put_back(self, ended: Sequence[Ended[O]], after_seconds: float = 0.0) -> None:
        """Take back ends that could not be written: return them again later."""
        ...

    def settle(self, ended: Sequence[Ended[O]], states: Mapping[int, str]) -> None:
        """Note the written ends. An end without a state has lost its message."""
        ...

    def note_lapsed(self, rows: Sequence[Row]) -> None:
        """Note the attempts that were ended because their leases have lapsed. Those `sending` begin again here."""
        ...

    def take_ended_claims(self) -> list[datetime]:
        """Return the claims whose attempts have all been written."""
        ...

    @property
    def in_flight(self) -> Mapping[int, object]:
        """The attempts without a written end, by the id of their message."""
        ...
