"""What the kernel needs from the rest of a worker, as types."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from datetime import datetime
from typing import Any, LiteralString, NamedTuple, Protocol, TypeVar

Row = tuple[Any, ...]
Step = tuple[LiteralString, Mapping[str, object]]


class Link(Protocol):
    """A connection of the worker."""

    async def trip(self, steps: Sequence[Step]) -> list[list[Row]]:
        """Run the statements in one transaction and one round trip, and return the rows of each.

        A statement that returns no rows has one row, with the number of the rows that it wrote.
        """
        ...

    def abandon(self) -> None:
        """Release the attempts of the last claim before the next trip: no handler begins."""
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


class Turns(Protocol):
    """The queues of a worker, and their order."""

    def order(self) -> Sequence[str]:
        """Return all queues, in the order in which the next claim reads them."""
        ...

    def record(self, counts: Mapping[str, int]) -> None:
        """Note how many messages a claim has found in each queue that it has read, in its order."""
        ...


class Keys(NamedTuple):
    """A message that has a coalesce key or an ordering key: others may wait for its end."""

    id: int
    topic: str
    queue: str
    coalesce_key: str | None
    ordering_key: str | None


@dataclass(frozen=True, slots=True)
class End:
    """The end of an attempt that is not simply sent, as it is to be written."""

    outcome: str
    reason: str | None = None
    delay_seconds: float = 0.0
    reason_code: str | None = None
    breaker_key: str | None = None
    error_place: str | None = None
    fails_after_seconds: float | None = None


class Attempt(Protocol):
    """An attempt, as the kernel sees it: its token, its keys if it has any, and its end. Without an end it is sent."""

    @property
    def message_id(self) -> int: ...
    @property
    def attempt_count(self) -> int: ...
    @property
    def claimed_at(self) -> datetime: ...
    @property
    def keys(self) -> Keys | None: ...
    @property
    def end(self) -> End | None: ...


E = TypeVar("E", bound=Attempt)


class Attempts(Protocol[E]):
    """The attempts of a worker: it begins those of a claim, and collects their ends."""

    def room(self) -> int:
        """Return how many messages to claim now."""
        ...

    def note_claimed(self, rows: Sequence[Row]) -> None:
        """Note rows of claim.sql whose attempts will begin."""
        ...

    async def begin(self, rows: Sequence[Row], overtaken: Set[int], seconds_ago: float) -> None:
        """Begin the attempts of these rows of claim.sql. Those in `overtaken` are superseded since their claim.

        The claim began `seconds_ago`.
        """
        ...

    def take_ended(self, most: int) -> list[E]:
        """Return up to `most` ends that are to be written."""
        ...

    def put_back(self, ended: Sequence[E], after_seconds: float = 0.0) -> None:
        """Take back ends that could not be written: return them again later."""
        ...

    def settle_sent(self, ended: Sequence[E]) -> None:
        """Note ends that are written as sent."""
        ...

    def settle(self, ended: Sequence[E], states: Mapping[int, str]) -> None:
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
