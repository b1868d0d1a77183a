"""Messages, their states, and the outcomes of attempts. Pure: no I/O, no clock."""

from __future__ import annotations

import copy
import enum
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, ClassVar, Generic, NamedTuple

from pydantic import AwareDatetime, BaseModel, ConfigDict, JsonValue
from typing_extensions import TypeVar

from pgoutbox.clock import Duration, seconds_of
from pgoutbox.errors import StateError
from pgoutbox.text import describe

# Without a model: any JSON value. For a type checker, `dict[str, int]` does not match `dict[str, JsonValue]`.
P = TypeVar("P", default=Any)


class State(enum.StrEnum):
    """The state of a message. The last four are final; `failed` waits for an operator."""

    PENDING = "pending"
    SENDING = "sending"
    SENT = "sent"
    FAILED = "failed"
    SKIPPED = "skipped"
    CANCELLED = "cancelled"


FINAL_STATES = frozenset({State.SENT, State.FAILED, State.SKIPPED, State.CANCELLED})
OWED = (State.PENDING, State.SENDING)
PARTITIONS = (OWED, (State.FAILED,), (State.SENT, State.SKIPPED, State.CANCELLED))


class AttemptOutcome(enum.StrEnum):
    """How an attempt ended. `pgoutbox.attempt_view` shows the attempts of each message."""

    SENT = "sent"
    RETRY = "retry"
    FAILED = "failed"
    SKIPPED = "skipped"
    CANCELLED = "cancelled"
    SNOOZED = "snoozed"
    RELEASED = "released"
    LOST = "lost"


class FencingToken(NamedTuple):
    """What a row must have, with the worker's name, for an attempt to write it."""

    id: int
    attempt_count: int
    claimed_at: datetime


class ReasonCode(enum.StrEnum):
    """The reason why pgoutbox postponed a message, recorded with the attempt. A handler's own snooze has none.

    `circuit_open`: the circuit breaker of its destination is open. `stalled`: its destination answers none of the sends
    in flight. `unavailable`: the transport or the handler reported `Unavailable`, and no breaker handles it.
    `redirect`: a redirect is on that the transport does not follow, or that a blackout forbids. `unreadable`: the
    payload does not fit the topic's model in this worker. `suppressed`, of a skipped message: its address gets no mail
    of this list.
    """

    CIRCUIT_OPEN = "circuit_open"
    STALLED = "stalled"
    UNAVAILABLE = "unavailable"
    REDIRECT = "redirect"
    UNREADABLE = "unreadable"
    SUPPRESSED = "suppressed"


# Not frozen: a frozen dataclass sets each field with a call, which takes five times as long.
@dataclass(slots=True)
class Message(Generic[P]):
    """One claimed message, as its handler sees it.

    `payload` is the JSON value that was enqueued, or an instance of the topic's payload model. `attempt_count` is the
    number of this attempt, from 1: it only grows. `payload_version` is that of the payload in the database, before its
    upgrade. `content` is the shared content of a fan-out.
    All its messages in this process share one object: do not change it. `database` is the name of its database, if that
    is one of many.
    """

    id: int
    topic: str
    queue: str
    destination: str | None
    payload: P
    headers: Mapping[str, str]
    attempt_count: int
    max_attempts: int
    created_at: datetime
    available_at: datetime
    coalesce_key: str | None
    ordering_key: str | None = None
    content: JsonValue = None
    payload_version: int = 1
    database: str | None = None

    @property
    def idempotency_key(self) -> str:
        """A text of ASCII letters, digits and a hyphen that is the same at every attempt and in no other message.

        It joins the id with the microsecond of creation. So a database that was created again, and counts from 1 again,
        does not repeat the keys of its predecessor.
        """
        return f"{self.id}-{int(self.created_at.timestamp() * 1_000_000):x}"


class Failure(BaseModel):
    """A message that failed for good, as the hook of its topic gets it: see `Outbox.on_failed`.

    `payload` is the JSON value that was enqueued, decrypted if it was encrypted. It is None for a payload of more than
    16 MB. `error` is the text that operators see: secrets in it are redacted.
    """

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True)

    message_id: int
    topic: str
    queue: str
    destination: str | None
    owner: str | None
    coalesce_key: str | None
    ordering_key: str | None
    error: str
    attempt_count: int
    created_at: AwareDatetime
    failed_at: AwareDatetime
    payload: Any
    payload_version: int = 1


@dataclass(frozen=True, slots=True)
class Sent:
    """The message was handed over. A handler that returns None means the same."""


class Transient(Exception):  # noqa: N818 - an outcome; it can be returned or raised
    """The attempt failed for a temporary reason: retry by the policy, until `max_attempts` is used up.

    `retry_after` (seconds or a timedelta) is the delay that the receiver requested.
    """

    def __init__(self, error: str, retry_after: Duration | None = None) -> None:
        super().__init__(error)
        self.error = error
        self.retry_after: float | None = None if retry_after is None else seconds_of(retry_after)


class SendFailure(Transient):
    """A transport failed for a temporary reason, and says more about it than `Transient` does.

    With `outage` the destination, or the way to it, is at fault and not this message: several such failures open a
    circuit breaker, that of `breaker`, one of the transport's own keys, or else that of the whole transport. With
    `doubtful` it names the recipient, or another part that may be at fault: then only failures of different ones
    count. `unknown` means that the message may have been sent: then the handler's `on_unknown` decides whether it is
    tried again.
    """

    def __init__(
        self,
        error: str,
        retry_after: Duration | None = None,
        *,
        outage: bool = False,
        doubtful: str | None = None,
        unknown: bool = False,
        breaker: str | None = None,
    ) -> None:
        super().__init__(error, retry_after)
        self.outage = outage
        self.doubtful = doubtful
        self.unknown = unknown
        self.breaker = breaker


class Unavailable(Exception):  # noqa: N818 - an outcome; it can be returned or raised
    """The transport does not work, whatever the message: a server, a sender, a password or a setting must be fixed.

    Nothing was handed over. The message stays pending and uses up no attempt, however often this happens. A transport
    that returns it opens a circuit breaker at once: that of `breaker`, one of the transport's own keys, or else that of
    the whole transport. With `outage` the fault may pass by itself: then only several in a row open the breaker, as
    those of `Transient` do. Without a breaker the delay grows by the handler's retry policy, from one second on.
    `retry_after` (seconds or a timedelta) is the minimum delay. `doubtful` names the recipient, or another part
    that may be at fault: after messages for others were sent it opens no breaker, and uses up attempts.
    """

    def __init__(
        self,
        error: str,
        retry_after: Duration | None = None,
        *,
        outage: bool = False,
        doubtful: str | None = None,
        breaker: str | None = None,
    ) -> None:
        super().__init__(error)
        self.error = error
        self.retry_after: float | None = None if retry_after is None else seconds_of(retry_after)
        self.outage = outage
        self.doubtful = doubtful
        self.breaker = breaker


class Permanent(Exception):  # noqa: N818 - an outcome; it can be returned or raised
    """The attempt failed permanently: the message ends `failed` and waits for an operator."""

    def __init__(self, error: str) -> None:
        super().__init__(error)
        self.error = error


class Skip(Exception):  # noqa: N818 - an outcome; it can be returned or raised
    """There is nothing left to deliver: the message ends `skipped` with this reason."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Suppressed(Skip):
    """A skip by pgoutbox itself: the address of the message gets no mail of its mailing list."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"suppressed: {reason}")


class Snooze(Exception):  # noqa: N818 - an outcome; it can be returned or raised
    """Delay the message: it is pending again after `delay` (seconds or a timedelta), and uses up no attempt.

    A delay below one second, or a moment in the past, counts as one second. Raises `ValueError` for NaN and infinity.
    The `reason` goes into the history of the message's attempts and into `last_error`.
    """

    def __init__(self, delay: Duration, reason: str | None = None) -> None:
        seconds = seconds_of(delay)
        if not math.isfinite(seconds):
            raise ValueError(f"Snooze: delay must be a finite number of seconds, got {seconds}")
        super().__init__(f"snoozed for {seconds} s")
        self.delay_seconds = seconds
        self.reason = reason


class Postponed(Snooze):
    """A snooze by pgoutbox itself, with its reason, and the key of the circuit breaker that caused it.

    `unknown_error` is the error of a send that may have succeeded. With a `held_delay` all messages of the topic with
    the scheme or web host of this one's destination have the same breaker. While it is open, they wait unclaimed, and
    this is the delay of this one.
    """

    def __init__(
        self,
        delay: float,
        reason: str,
        *,
        code: ReasonCode,
        breaker_key: str | None = None,
        unknown_error: str | None = None,
        held_delay: float | None = None,
    ) -> None:
        super().__init__(delay, reason)
        self.code = code
        self.breaker_key = breaker_key
        self.unknown_error = unknown_error
        self.held_delay = held_delay


Outcome = Sent | Transient | Unavailable | Permanent | Skip | Snooze


def upgraded(payload: object, version: int, wanted: int, upgrades: Mapping[int, Callable[[Any], Any]]) -> object:
    """Return a payload of an earlier version in the wanted one. Raises `StateError` if that is impossible."""
    payload = copy.deepcopy(payload)  # The caller may upgrade it again.
    if version > wanted:
        raise StateError(f"the payload has version {version}, and the topic {wanted}")
    for earlier in range(version, wanted):
        if earlier not in upgrades:
            raise StateError(f"the payload has version {earlier}, and the topic no upgrade of it")
        try:
            payload = upgrades[earlier](payload)
        except Exception as error:
            raise StateError(f"the payload cannot be upgraded from version {earlier}: {describe(error)}") from error
    return payload
