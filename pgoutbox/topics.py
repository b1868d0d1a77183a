"""Topics and new messages.

A mistake in a topic raises `ConfigurationError` at its definition.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from dataclasses import field as dataclass_field
from datetime import datetime
from typing import Any, Final, Generic, cast

from typing_extensions import Unpack

from pgoutbox.clock import Duration
from pgoutbox.errors import ArgumentError, ConfigurationError
from pgoutbox.message import P
from pgoutbox.options import (
    OPTIONS,
    MessageOptions,
    OnDuplicate,
    check_defined,
    check_delay,
    check_model,
    check_name,
    check_redact,
    check_version,
    if_given,
)
from pgoutbox.retry import UNREADABLE_TIMEOUT_SECONDS, RetryPolicy
from pgoutbox.text import preview

ALERT_TOPIC: Final = "pgoutbox.alert"
_OF_MESSAGES: Final = frozenset(MessageOptions.__annotations__)


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
    The mail of a topic with a `mailing_list` does not go to suppressed addresses: see `Producer.suppress`.
    `redact` names further values to hide, besides passwords and similar ones: names, or paths such as `user.email`. A
    message whose payload does not fit the model of a worker waits for another worker, and fails after
    `unreadable_timeout` and ten attempts.
    A change of the payload that workers with the former code cannot read has another `version`: they leave such
    messages alone. `upgrade` brings a payload of an earlier version, as the JSON value that was enqueued, to the next
    one: `{1: to_version_2}`. `aliases` are former names of the topic, whose messages its handler gets too.
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
    fair_key: Callable[[P], str | None] | None = None
    halts_key: bool | None = None
    max_delay: Duration | None = None
    owner: Callable[[P], str | None] | None = None
    on_duplicate: OnDuplicate | None = None
    encrypted: bool = False
    redact: tuple[str, ...] = ()
    mailing_list: str | None = None
    unreadable_timeout: Duration = UNREADABLE_TIMEOUT_SECONDS
    version: int = 1
    upgrade: Mapping[int, Callable[[Any], Any]] = dataclass_field(default_factory=dict, hash=False)
    aliases: tuple[str, ...] = ()
    payload_version: int | None = dataclass_field(init=False, repr=False, compare=False)
    has_options: bool = dataclass_field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # The default of the database needs no option.
        object.__setattr__(self, "payload_version", None if self.version == 1 else self.version)
        given = {name: value for name in OPTIONS if (value := getattr(self, name, None)) is not None}
        object.__setattr__(self, "has_options", bool(given or self.retry))
        try:
            check_name("name", self.name)
            check_delay("unreadable_timeout", self.unreadable_timeout)
            if_given(check_model, "payload", self.payload)
            check_redact("redact", self.redact)
            if_given(check_name, "mailing_list", self.mailing_list)
            check_version("version", self.version)
            self._check_upgrades()
            for place, alias in enumerate(self.aliases):
                check_name(f"aliases[{place}]", alias)
            check_defined(given)
        except ArgumentError as error:
            raise ConfigurationError(f"topic {self.name!r}: {error}") from None

    def _check_upgrades(self) -> None:
        for version, function in self.upgrade.items():
            if version not in range(1, self.version):
                raise ArgumentError(
                    f"upgrade[{version!r}]", f"must be for an earlier version than the topic's, which is {self.version}"
                )
            if inspect.iscoroutinefunction(function) or not callable(function):
                text = f"must be a function of the payload, not async, not {preview(function)}"
                raise ArgumentError(f"upgrade[{version}]", text)
        for version in range(min(self.upgrade, default=self.version), self.version):
            if version not in self.upgrade:
                raise ArgumentError("upgrade", f"has no function for version {version}")


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
