"""What the kernel needs from the rest of a worker, as types."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from datetime import datetime
from typing import Any, LiteralString, NamedTuple, Protocol, TypeVar

Row = tuple[Any, ...]
Step = tuple[LiteralString, Mapping[str, object]]


class Link(Protocol):
    """A connection of the worker."""

    async def trip(self, steps: Sequence[Step]) -> list[list[Row]]:
        """Run the statements in one transaction and one round trip, and return the rows of each.

        A statement that returns no rows has one row, with the number of the rows that it wrote. A trip beside an
        unanswered one releases what that one has claimed.
        """
        ...

    def abandon(self) -> None:
        """Let the next trip release the claimed attempts that have not begun: no handler begins."""
        ...

    def refuses(self, error: BaseException) -> bool:
        """Return whether the database would answer the same statements with this error again."""
        ...


class Rest(NamedTuple):
    """How long an idle worker may sleep. After `poll_seconds` it claims, and 0 means once more, at once.

    After `look_seconds` it asks whether something has fallen due since its last claim, and asks for the bell again.
    """

    poll_seconds: float = math.inf
    look_seconds: float = math.inf


class Bell(Protocol):
    """Wakes a worker, or another idle one, at the commit of a message."""

    async def hold(self, also: Callable[[], Step]) -> tuple[Rest, list[Row] | None]:
        """Get ready to sleep: each later commit wakes this worker, or the one on which it relies.

        If that takes a trip to the server, it also runs this statement, and returns its rows.
        """
        ...

    async def release(self) -> None:
        """Producers need not notify a worker that is busy. Other idle workers take over."""
        ...

    async def hush(self) -> None:
        """Producers need not notify a worker that polls. Other idle workers still rely on it."""
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
    held_delay_seconds: float | None = None
    """The delay if all messages of its hold wait unclaimed for the breaker `breaker_key`. None: none waits."""
    is_for_others: bool = False
    """Whether another worker may be able to deliver the message: the idle ones are told."""


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

    def room(self, on_the_way: int) -> int:
        """Return how many messages to claim now, beside those that are claimed but not begun."""
        ...

    def may_probe(self) -> bool:
        """Return whether another message may probe a breaker: probes of hosts that hang leave slots to others."""
        ...

    async def begin(self, rows: Sequence[Row], overtaken: Set[int], claimed_at: float) -> None:
        """Begin the attempts of these rows of claim.sql. Those in `overtaken` are superseded since their claim.

        The trip of the claim began at `claimed_at`, by a clock that also runs while the machine is suspended.
        """
        ...

    async def begin_probe(self, row: Row, overtaken: Set[int], claimed_at: float) -> None:
        """Begin the attempt of a row like those of `begin`, whose message probes a breaker.

        The key of the breaker, the id of the probe and the hold of the message follow the other columns.
        """
        ...

    def take_ended(self, most: int) -> list[E]:
        """Return up to `most` ends that are to be written."""
        ...

    async def forgotten(self, ended: Sequence[E]) -> Sequence[E]:
        """Return the sent ones whose messages a retention rule may delete at once."""
        ...

    def put_back(self, ended: Sequence[E], after_seconds: float = 0.0) -> None:
        """Take back ends that could not be written: return them again later."""
        ...

    def note_refused(self, one: E, error: BaseException) -> None:
        """Take back an end that the database refuses to write. Return it again later, and alone."""
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

    def take_ended_claims(self, ended: Sequence[E]) -> list[datetime]:
        """Return the claims whose attempts have all been written, or will be with these ends."""
        ...

    @property
    def unwritten_count(self) -> int:
        """Number of attempts whose end must still be written, without those whose end is refused."""
        ...

    @property
    def in_flight(self) -> Mapping[int, object]:
        """The attempts without a written end, by the id of their message."""
        ...
