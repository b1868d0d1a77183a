"""Topics and new messages.

A mistake in a topic raises `ConfigurationError` at its definition.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from dataclasses import field as dataclass_field
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Generic, Literal, TypedDict, cast, get_args

from typing_extensions import Unpack

from pgoutbox.clock import Duration
from pgoutbox.errors import ArgumentError, ConfigurationError
from pgoutbox.message import P
from pgoutbox.options import (
    CLOCK_TOLERANCE,
    check_available_at,
    check_delay,
    check_destination,
    check_expires_at,
    check_headers,
    check_key,
    check_max_attempts,
    check_model,
    check_name,
    check_owner,
    check_redact,
    if_given,
)
from pgoutbox.retry import UNREADABLE_TIMEOUT_SECONDS, RetryPolicy
from pgoutbox.text import preview

OnDuplicate = Literal["error", "ignore"]

ALERT_TOPIC: Final = "pgoutbox.alert"
KEYS: Final = ("coalesce_key", "dedupe_key", "ordering_key")


class FanoutOptions(TypedDict, total=False):
    """The options of the messages of a fan-out at a call site."""

    queue: str | None
    available_at: datetime | None
    delay: Duration | None
    expires_at: datetime | None
    headers: Mapping[str, str] | None
    max_attempts: int | None
    owner: str | None


class MessageOptions(FanoutOptions, total=False):
    """The options of a message at a call site.

    `delay` and `max_delay` (seconds or timedeltas) count on PostgreSQL's clock; give `delay` or `available_at`.
    `available_at` and `expires_at` are datetimes with a time zone. With `on_duplicate="ignore"` a message with a known
    `dedupe_key` and another payload is a duplicate, too; otherwise it is an error.
    """

    destination: str | None
    coalesce_key: str | None
    dedupe_key: str | None
    ordering_key: str | None
    halts_key: bool | None
    max_delay: Duration | None
    on_duplicate: OnDuplicate | None


def _check_halts_key(field: str, value: object) -> bool:
    """Return whether a failed message halts its ordering key."""
    if not isinstance(value, bool):
        raise ArgumentError(field, f"must be True or False, not {preview(value)}")
    return value


def _check_on_duplicate(field: str, value: object) -> str:
    """Return the rule for a dedupe key that a message with another payload has."""
    if value not in get_args(OnDuplicate):
        raise ArgumentError(field, f"must be error or ignore, not {preview(value)}")
    return str(value)


# The options and their checks, by their names in the type `pgoutbox.draft`. Only a topic has `expires_after`.
OPTIONS: Final[Mapping[str, Callable[[str, object], object]]] = {
    "queue": check_name,
    "destination": check_destination,
    "owner": check_owner,
    "coalesce_key": check_key,
    "ordering_key": check_key,
    "dedupe_key": check_key,
    "on_duplicate": _check_on_duplicate,
    "halts_key": _check_halts_key,
    "available_at": check_available_at,
    "delay": check_delay,
    "max_delay": check_delay,
    "expires_at": check_expires_at,
    "expires_after": check_delay,
    "max_attempts": check_max_attempts,
    "headers": check_headers,
}
# An option, and the one that it needs.
_TOGETHER: Final = (("halts_key", "ordering_key"), ("max_delay", "coalesce_key"), ("on_duplicate", "dedupe_key"))
# An option of a message, and the field of a topic that takes its place.
REPLACED: Final[Mapping[str, str]] = {"available_at": "delay", "expires_at": "expires_after", "max_attempts": "retry"}
_OF_MESSAGES: Final = frozenset(MessageOptions.__annotations__)


def check_together(options: Mapping[str, Any]) -> None:
    """Refuse checked options that exclude or lack each other."""
    if "ordering_key" in options and "coalesce_key" in options:
        raise _not_both_keys()
    for name, needed in _TOGETHER:
        if options.get(name, False) is not False and needed not in options:
            raise ArgumentError(name, f"only together with {needed}")
    available_at, delay, expires_at = options.get("available_at"), options.get("delay"), options.get("expires_at")
    if available_at is not None and delay is not None:
        raise ArgumentError("delay", "give delay or available_at, not both")
    if expires_at is None:
        return
    if available_at is not None and expires_at <= available_at:
        raise ArgumentError("expires_at", "must be later than available_at")
    if delay is not None and expires_at < datetime.now(UTC) + timedelta(seconds=delay) - CLOCK_TOLERANCE:
        raise ArgumentError("expires_at", "must be later than the end of the delay")


def _not_both_keys() -> ArgumentError:
    return ArgumentError(
        "ordering_key", "give ordering_key or coalesce_key, not both: newer messages replace older ones, or follow them"
    )


@dataclass(frozen=True, slots=True)
class Topic(Generic[P]):
    """The definition of a topic: its payload model, its queue, its keys and its policy.

    An option that is given here belongs to the topic: a call site that passes it too is refused, so that call sites
    cannot differ. An option that is None is free for each call site. `destination`, `owner` and the keys are computed
    from the payload, an instance of the model if there is one. `delay` and `expires_after` are seconds or
    timedeltas; `expires_after` counts from the due time of the message. Messages with one queue and `ordering_key` are
    delivered one after the other, in the order of their commits. With `halts_key` the messages behind a failed
    one wait until an operator has redriven or pruned it. Each newer coalesced message restarts the `delay`, but for no
    longer than `max_delay` since the first waiting one. The payloads of an `encrypted` topic, and the contents of
    its fan-outs, are stored encrypted with PGOUTBOX_ENCRYPTION_KEYS; its keys, destinations and headers stay readable.
    `redact` names further values to hide, besides passwords and similar ones: names, or paths such as `user.email`. A
    message whose payload does not fit the model of a worker waits for another worker, and fails after
    `unreadable_timeout` and ten attempts.
    Raises `ConfigurationError` for a mistake.

        activation = Topic(
            "mail.activation",
            payload=Activation,
            queue="critical",
            destination=lambda p: f"mailto:{p.email}",
            coalesce_key=lambda p: str(p.user_id),
        )
    """

    name: str
    _: KW_ONLY
    payload: type[P] | None = None
    queue: str | None = None
    destination: str | Callable[[P], str | None] | None = None
    coalesce_key: Callable[[P], str | None] | None = None
    dedupe_key: Callable[[P], str | None] | None = None
    retry: RetryPolicy | None = None
    delay: Duration | None = None
    expires_after: Duration | None = None
    ordering_key: Callable[[P], str | None] | None = None
    halts_key: bool | None = None
    max_delay: Duration | None = None
    owner: Callable[[P], str | None] | None = None
    on_duplicate: OnDuplicate | None = None
    encrypted: bool = False
    redact: tuple[str, ...] = ()
    unreadable_timeout: Duration = UNREADABLE_TIMEOUT_SECONDS
    has_options: bool = dataclass_field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        given = {name: value for name in OPTIONS if (value := getattr(self, name, None)) is not None}
        object.__setattr__(self, "has_options", bool(given or self.retry))
        try:
            check_name("name", self.name)
            check_delay("unreadable_timeout", self.unreadable_timeout)
            if_given(check_model, "payload", self.payload)
            check_redact("redact", self.redact)
            _check_defined(given)
        except ArgumentError as error:
            raise ConfigurationError(f"topic {self.name!r}: {error}") from None


def _check_defined(options: Mapping[str, object]) -> None:
    """Check the options of a definition. A function of the payload is checked by its results."""
    if "ordering_key" in options and "coalesce_key" in options:
        raise _not_both_keys()
    checked = {name: OPTIONS[name](name, value) for name, value in options.items() if not callable(value)}
    if checked.get("expires_after") == 0:
        raise ArgumentError("expires_after", "must be more than 0")


def name_of(topic: str | Topic[Any]) -> str:
    """Return the name of a topic that is given by its name or its definition."""
    return topic.name if isinstance(topic, Topic) else topic


@dataclass(slots=True, init=False)
class NewMessage(Generic[P]):
    """A message to enqueue: topic, payload, and the options that the topic's definition leaves open.

    `options` are the `MessageOptions` that are not None.

        NewMessage("mail.welcome", {"user_id": 7}, dedupe_key="welcome-7")
    """

    topic: str | Topic[P]
    payload: P
    options: MessageOptions

    def __init__(self, topic: str | Topic[P], payload: P, **options: Unpack[MessageOptions]) -> None:
        if not options.keys() <= _OF_MESSAGES:
            unknown = min(options.keys() - _OF_MESSAGES)
            raise TypeError(f"NewMessage got an unexpected keyword argument {unknown!r}")
        self.topic = topic
        self.payload = payload
        if None in options.values():
            options = cast("MessageOptions", {name: value for name, value in options.items() if value is not None})
        self.options = options


@dataclass(frozen=True, slots=True)
class Recipient:
    """One destination of a fan-out with values of its own. None means the value of the fan-out.

    The fields have the meaning of those of `NewMessage`.

        Recipient("mailto:ada@example.org", payload={"name": "Ada"}, delay=60)
    """

    destination: str
    _: KW_ONLY
    payload: object = None
    headers: Mapping[str, str] | None = None
    available_at: datetime | None = None
    delay: Duration | None = None
    owner: str | None = None
