"""Attempts and their results: types that the parts of a worker share."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Final

import psycopg
from psycopg.rows import TupleRow

from pgoutbox.clock import elapsed_clock
from pgoutbox.errors import ConfigurationError, LeaseLostError
from pgoutbox.handlers import Context, Handler, lent
from pgoutbox.kernel.seams import End, Keys
from pgoutbox.message import FencingToken, Message, Outcome, Snooze
from pgoutbox.worker.threads import thread_owner

_REMEMBERED: Final = 10_000


@dataclass(slots=True, eq=False)
class Claim:
    """One claim of this worker: its identity in the database, and the number of its attempts in flight."""

    claimed_at: datetime
    left_count: int = 0
    is_closed: bool = False
    """Whether it is deleted, or must lapse because the outcome of an attempt is not written."""


class InFlight(dict[int, "Attempt"]):
    """The attempts of one worker in flight, by the id of their message.

    A lease that is older than `stale_seconds` may have ended unnoticed, for example because the process was suspended.
    So may one from before `lost_at`, when a connection was last lost: after a failover the server may not know the last
    claims and renewals.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stale_seconds = math.inf
        self.lost_at = -math.inf
        self.ended_claims: list[Claim] = []
        """Claims without an attempt in flight that still have a row in the database."""
        self.lost: dict[int, Attempt] = {}
        """The last attempts that have handed their messages over, and were lost before that could be written."""

    def __setitem__(self, message_id: int, attempt: Attempt) -> None:
        if message_id in self:
            del self[message_id]
        attempt.claim.left_count += 1
        super().__setitem__(message_id, attempt)

    def __delitem__(self, message_id: int) -> None:
        claim = self[message_id].claim
        super().__delitem__(message_id)
        claim.left_count -= 1
        if claim.left_count == 0 and not claim.is_closed:
            self.ended_claims.append(claim)

    def note_deleted(self, claims: Iterable[Claim]) -> None:
        """Remember that the database no longer has these claims."""
        for claim in claims:
            claim.is_closed = True
        self.ended_claims = [claim for claim in self.ended_claims if not claim.is_closed]

    def note_lost_connection(self) -> None:
        """Trust no lease of a claim or renewal before now. Any thread may call it."""
        self.lost_at = elapsed_clock()

    def note_lost(self, attempt: Attempt) -> None:
        """Remember an attempt that has handed its message over, and was lost before that could be written."""
        attempt.message = replace(attempt.message, payload=None, content=None)  # There may be many.
        self.lost[attempt.message_id] = attempt
        if len(self.lost) > _REMEMBERED:
            del self.lost[next(iter(self.lost))]

    def forget(self, attempt: Attempt) -> None:
        """Forget an attempt. This process may have claimed its message again, after its lease ran out."""
        if self.get(attempt.message_id) is attempt:
            del self[attempt.message_id]

    def abandon(self, attempt: Attempt) -> None:
        """Forget an attempt whose outcome is not written: its claim must lapse."""
        attempt.claim.is_closed = True
        self.forget(attempt)


_ALONE: Final = InFlight()  # No other attempt, and no doubt.


@dataclass(slots=True, eq=False, repr=False)
class Attempt(Context):
    """One attempt, from its claim to its finish. Its handler sees it as a `Context`. Times are on `elapsed_clock`.

    `attempt_count` is part of the fencing token. The message keeps the number that its handler got: see `take_over`.
    `used_count` is the number of attempts that used up budget, including this one: without snoozes, releases and
    attempts before a redrive. `overtaken` is the reason why the attempt has become pointless. `done` means that its
    result is known, `sent` that it is a hand-over, and `is_written` that its handler's transaction has written it.
    `end` is how it has ended, unless it is sent, and `keys` are those of its message, if it has any.
    `is_payload_large` means that its slot reads the payload, and `large_content_id` is the shared content that it
    reads. A hand-over after `expiring_at` is too late. While `is_at_gate`, its handler has not begun. If its topic
    has a mailing list, it was not suppressed `unsuppressed_at`, and may have a `link` to unsubscribe.
    """

    message: Message[object]
    handler: Handler
    claim: Claim
    leased_at: float
    _ensure: Callable[[Attempt], Awaitable[None]]
    used_count: int = 1
    end: End | None = field(default=None, init=False)
    keys: Keys | None = field(default=None, init=False)
    is_payload_large: bool = field(default=False, init=False)
    large_content_id: int | None = field(default=None, init=False)
    expiring_at: float = field(default=math.inf, init=False)
    overtaken: str | None = field(default=None, init=False)
    done: bool = field(default=False, init=False)
    sent: bool = field(default=False, init=False)
    is_written: bool = field(default=False, init=False)
    is_at_gate: bool = field(default=False, init=False)
    unsuppressed_at: float = field(default=-math.inf, init=False)
    link: str | None = field(default=None, init=False)
    sync_connection: psycopg.Connection[TupleRow] | None = field(default=None, init=False)
    _connection: psycopg.AsyncConnection[TupleRow] | None = field(default=None, init=False)
    in_flight: InFlight = field(init=False)
    message_id: int = field(init=False)
    attempt_count: int = field(init=False)
    max_attempts: int = field(init=False)

    def __post_init__(self) -> None:
        message = self.message
        self.in_flight = _ALONE
        self.message_id = message.id
        self.attempt_count = message.attempt_count
        self.max_attempts = message.max_attempts

    @property
    def claimed_at(self) -> datetime:
        """The name of its claim."""
        return self.claim.claimed_at

    def may_go_on(self, created_at: datetime, destination: str | None, attempt_count: int, max_attempts: int) -> bool:
        """Whether it may continue under another claim: of its message, on which no operator has acted meanwhile.

        A snooze or a release gives an attempt back, and raises `max_attempts` by one. Other workers may have done that
        with the attempts in between. A redrive, a correction, or an operator's release of this one raises it by more.
        After a failover the numbers may be smaller, and another message may have the id.
        """
        is_same = (created_at, destination) == (self.message.created_at, self.message.destination)
        in_between = max(attempt_count - self.attempt_count - 1, 0)
        return is_same and max_attempts - self.max_attempts <= in_between

    @property
    def token(self) -> FencingToken:
        """What its row must have for it to write."""
        return FencingToken(self.message.id, self.attempt_count, self.claim.claimed_at)

    @property
    def connection(self) -> psycopg.AsyncConnection[TupleRow]:
        return lent(self._connection)

    @connection.setter
    def connection(self, connection: psycopg.AsyncConnection[TupleRow]) -> None:
        self._connection = connection

    @property
    def has_begun(self) -> bool:
        """Whether its handler may have begun: a transactional one begins when it gets its connection."""
        if self.handler.transactional and (self._connection or self.sync_connection) is None:
            return False
        return not self.is_at_gate

    @property
    def unsubscribe_url(self) -> str:
        if self.link is None:
            raise ConfigurationError(
                "ctx.unsubscribe_url: needs a topic with a mailing_list, and PGOUTBOX_UNSUBSCRIBE_URL with "
                "PGOUTBOX_UNSUBSCRIBE_KEYS"
            )
        return self.link

    @property
    def should_stop(self) -> bool:
        return self.overtaken is not None or self.expiring_at <= elapsed_clock()

    async def ensure_lease(self) -> None:
        if self.done or self.expiring_at <= elapsed_clock():
            raise LeaseLostError(self._named("ended" if self.done else "expired"))
        await self._ensure(self)

    @property
    def is_incomplete(self) -> bool:
        """Whether its claim has left out a large payload or content."""
        return self.is_payload_large or self.large_content_id is not None

    def is_in_doubt(self, now: float) -> bool:
        """Whether it takes more than the elapsed time to know that the message is still to be sent."""
        return (
            self.overtaken is not None
            or self.leased_at < now - self.in_flight.stale_seconds
            or self.leased_at <= self.in_flight.lost_at
            or self.expiring_at <= now
            or self.done
        )

    async def pass_gate(self) -> None:
        """Raise `Snooze` unless the message is still to be sent. It asks the database only in case of doubt."""
        if self.is_in_doubt(elapsed_clock()):
            slot = thread_owner.get()
            slot.pause_timeout()  # The answer may take longer than the handler may.
            try:
                await self.ensure_lease()
            except LeaseLostError as lost:
                raise Snooze(0, str(lost)) from lost
            except (psycopg.Error, OSError) as error:
                text = f"not sent: its lease could not be checked: {type(error).__name__}"
                raise Snooze(0, self._named(text)) from error
            finally:
                slot.restart_timeout()

    def _named(self, text: str) -> str:
        return f"message {self.message.id}, attempt {self.attempt_count}: {text}"

    def take_over(self, attempt_count: int, max_attempts: int, claim: Claim, leased_at: float) -> None:
        """Continue under another claim by the same worker, after the server has lost the first one."""
        self.attempt_count = attempt_count
        self.max_attempts = max_attempts
        self.claim = claim
        self.leased_at = leased_at
        self.overtaken = None


class Released(Snooze):
    """The attempt did not run, or the worker's shutdown stopped it: pending again, no attempt used up.

    `unknown` means that its handler ran, so the message may have been sent: the handler's `on_unknown` applies.
    """

    def __init__(self, *, unknown: bool = False) -> None:
        super().__init__(0)
        self.unknown = unknown


RELEASED: Final = Released()
STOPPED: Final = Released(unknown=True)

# The attempts of one unit of work: one message, or a batch of one handler.
Work = Sequence[Attempt]
# Runs all attempts of a unit of work. Returns their outcomes in the same order.
RunWork = Callable[[Work], Awaitable[Sequence[Outcome]]]
