"""What may be enqueued: topics, new messages, and the checks they pass before any SQL. Pure: no I/O, no statement.

A mistake raises `PayloadError` with the path of what is wrong, so that the caller's transaction stays usable. Whatever
is accepted comes back from PostgreSQL with the same value; only a tuple comes back as a list.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from dataclasses import field as dataclass_field
from datetime import MAXYEAR, UTC, datetime, timedelta
from operator import attrgetter
from typing import Any, Final, Generic, Literal, NamedTuple, cast, get_args

from pydantic import BaseModel
from pydantic_core import to_json as encode_json
from typing_extensions import TypeVar

from pgoutbox.encryption import Identity, Keyring
from pgoutbox.errors import ConfigurationError, PayloadError
from pgoutbox.message import P
from pgoutbox.payloads import Serializer, check_model, check_storable, fit, member, shown, to_json
from pgoutbox.redaction import check_redacted_name
from pgoutbox.retry import RetryPolicy

MAX_KEY_BYTES: Final = 512
MAX_DESTINATION_BYTES: Final = 2_048
MAX_HEADER_COUNT: Final = 64
MAX_HEADER_BYTES: Final = 65_536
MAX_ATTEMPTS_BOUND: Final = 10_000
MAX_DELAY: Final = timedelta(days=3_650)
CHUNK_ROWS: Final = 5_000
CHUNK_CHARACTERS: Final = 16_000_000

OnFailed = Literal["continue", "halt"]
CoalesceRule = Literal["newest", "pending"]
V = TypeVar("V")
# Without a model any payload will do; a call site's `dict[str, int]` is no `dict[str, JsonValue]` to a type checker.
T = TypeVar("T", default=Any)

_NAME = re.compile(r"[a-z][a-z0-9_.-]{0,62}")
_DESTINATION = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:[^\x00-\x1f\x7f-\x9f\u2028\u2029]+")
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")

_NO_DEBOUNCE = 'not together with coalesce_rule="pending": its messages keep their own delay'
_NOT_BOTH = "give ordering_key or coalesce_key, not both: newer messages replace older ones, or follow them"

# The application's clock may be hours wrong, and PostgreSQL's decides. Only what is wrong by more than a day is refused
# here already, before a statement could fail.
_CLOCK_TOLERANCE = timedelta(days=1)
_MAX_AHEAD = timedelta(days=3_653)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Topic(Generic[T]):
    """One place for what a topic is: its payload model, its queue, its keys and its policy.

    What is given here belongs to the topic: a call site that passes it too is refused, so that call sites cannot drift.
    What is None is the call site's to choose. `destination`, `coalesce_key` and `dedupe_key` are computed from the
    payload, an instance of the model if there is one. `delay` and `expires_after` are seconds or timedeltas;
    `expires_after` counts from when the message falls due. Messages of one queue and `ordering_key` are delivered one
    after the other, in the order of their commits; with `on_failed="halt"` those behind one that failed wait until a
    person has redriven or pruned it. Of coalesced messages each newer one begins the `delay` anew, for no longer than
    `max_delay` since the first that waits. `coalesce_rule="pending"` coalesces without locks, for messages that say
    "look again": of the messages of a key that are due, the newest is delivered. The payloads of an `encrypted` topic,
    and the contents of its fan-outs, are stored encrypted with PGOUTBOX_ENCRYPTION_KEYS; its keys, destinations and
    headers stay readable. `redact` names what is hidden from people besides passwords and the like: names, or paths
    such as `user.email`. Raises `ConfigurationError` for a mistake.

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
    payload: type[T] | None = None
    queue: str | None = None
    destination: str | Callable[[T], str | None] | None = None
    coalesce_key: Callable[[T], str | None] | None = None
    dedupe_key: Callable[[T], str | None] | None = None
    retry: RetryPolicy | None = None
    delay: float | timedelta | None = None
    expires_after: float | timedelta | None = None
    ordering_key: Callable[[T], str | None] | None = None
    on_failed: OnFailed | None = None
    max_delay: float | timedelta | None = None
    coalesce_rule: CoalesceRule | None = None
    encrypted: bool = False
    redact: tuple[str, ...] = ()
    has_options: bool = dataclass_field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "has_options", _topic_options(self) != _NO_TOPIC_OPTIONS)
        try:
            check_name("name", self.name)
            _if_given(check_name, "queue", self.queue)
            _if_given(_check_delay, "delay", self.delay)
            _if_given(_check_delay, "max_delay", self.max_delay)
            _if_given(_check_on_failed, "on_failed", self.on_failed)
            _if_given(_check_coalesce_rule, "coalesce_rule", self.coalesce_rule)
            if self.ordering_key is not None and self.coalesce_key is not None:
                raise PayloadError("ordering_key", _NOT_BOTH)  # noqa: TRY301 - leaves as the others do
            if self.max_delay is not None and self.coalesce_rule == "pending":
                raise PayloadError("max_delay", _NO_DEBOUNCE)  # noqa: TRY301 - leaves as the others do
            if _if_given(_check_delay, "expires_after", self.expires_after) == 0:
                raise PayloadError("expires_after", "must be more than 0")  # noqa: TRY301 - leaves as the others do
            if not callable(self.destination):
                _if_given(_check_destination, "destination", self.destination)
            _if_given(check_model, "payload", self.payload)
            _check_redact("redact", self.redact)
        except PayloadError as error:
            raise ConfigurationError(f"topic {self.name!r}: {error}") from None

    @property
    def model(self) -> type[BaseModel] | None:
        """The payload model; None where the payload is any JSON value."""
        return cast("type[BaseModel] | None", self.payload)


# Not frozen: a frozen dataclass sets its 15 fields one call at a time, which takes five times as long.
@dataclass(slots=True)
class NewMessage(Generic[P]):
    """A message to enqueue: topic, payload, and whatever the topic's definition leaves open.

    `delay` (seconds or a timedelta) counts on PostgreSQL's clock; give it or `available_at`. Datetimes need a
    time zone.

        NewMessage("mail.welcome", {"user_id": 7}, dedupe_key="welcome-7")
    """

    topic: str | Topic[P]
    payload: P
    _: KW_ONLY
    queue: str | None = None
    destination: str | None = None
    coalesce_key: str | None = None
    dedupe_key: str | None = None
    available_at: datetime | None = None
    delay: float | timedelta | None = None
    expires_at: datetime | None = None
    headers: Mapping[str, str] | None = None
    max_attempts: int | None = None
    ordering_key: str | None = None
    on_failed: OnFailed | None = None
    max_delay: float | timedelta | None = None
    coalesce_rule: CoalesceRule | None = None


class Draft(NamedTuple):
    """A checked message, in the order of the parameters of `sql.ENQUEUE`. None means the default."""

    topic: str
    payload: str
    queue: str | None
    destination: str | None
    coalesce_key: str | None
    dedupe_key: str | None
    available_at: datetime | None
    delay_seconds: float | None
    expires_at: datetime | None
    expires_after_seconds: float | None
    headers: str | None
    max_attempts: int | None
    ordering_key: str | None = None
    on_failed: str | None = None
    max_delay_seconds: float | None = None
    coalesce_rule: str | None = None


class Fanout(NamedTuple):
    """A checked fan-out, in the order of the parameters of `sql.ENQUEUE_FANOUT`. None means the default."""

    topic: str
    payload: str
    destinations: list[str]
    content: str | None
    queue: str | None
    available_at: datetime | None
    delay_seconds: float | None
    expires_at: datetime | None
    expires_after_seconds: float | None
    headers: str | None
    max_attempts: int | None


_message_options = attrgetter(
    "queue",
    "destination",
    "coalesce_key",
    "dedupe_key",
    "available_at",
    "delay",
    "expires_at",
    "headers",
    "max_attempts",
    "ordering_key",
    "on_failed",
    "max_delay",
    "coalesce_rule",
)
_topic_options = attrgetter(
    "queue",
    "destination",
    "coalesce_key",
    "dedupe_key",
    "retry",
    "delay",
    "expires_after",
    "ordering_key",
    "on_failed",
    "max_delay",
    "coalesce_rule",
)
_NO_MESSAGE_OPTIONS = (None,) * 13
_NO_TOPIC_OPTIONS = (None,) * 11
_NO_CHECKED_OPTIONS = (None,) * 9


def carrying(message: NewMessage[P], context: Mapping[str, str]) -> NewMessage[P]:
    """The message with the headers of a trace, as far as it has none of its own and there is room for them.

    Whatever is wrong with its headers is for `prepare` to say: a trace is no reason to refuse a message.
    """
    if not context:
        return message
    headers: object = message.headers
    if headers is None:
        return replace(message, headers=context)
    if not isinstance(headers, Mapping) or len(headers) + len(context) > MAX_HEADER_COUNT:
        return message
    if len(repr(headers)) > MAX_HEADER_BYTES // 2:
        return message
    return replace(message, headers={**headers, **context}) if context.keys().isdisjoint(headers) else message


def prepare(
    message: NewMessage[P],
    topic: Topic[P],
    *,
    max_attempts: int | None,
    max_payload_bytes: int,
    serializer: Serializer | None,
    keyring: Keyring | None = None,
    is_fanout: bool = False,
) -> Draft:
    """Check a message against its topic's definition, which wins. `max_attempts` is what it gets unless it asks.

    Raises `PayloadError` with the path of what is wrong, and `ConfigurationError` for an encrypted topic without a
    keyring. What a function of the topic or the serializer raises passes through.
    """
    payload = message.payload if topic.payload is None else fit(topic.payload, message.payload)
    text = to_json(payload, max_bytes=max_payload_bytes, serializer=serializer)
    given = _message_options(message)
    if given == _NO_MESSAGE_OPTIONS and not topic.has_options and not topic.encrypted:
        return Draft._make((topic.name, text, *_NO_CHECKED_OPTIONS, max_attempts, None, None, None, None))

    options = _settled(topic, message, payload) if topic.has_options else (*given[:7], None, *given[7:])
    checked = [
        None if value is None else rule.check(rule.field, value) for rule, value in zip(_RULES, options, strict=True)
    ]
    draft = Draft._make((topic.name, text, *checked))
    if max_attempts is not None and draft.max_attempts is None:
        draft = draft._replace(max_attempts=max_attempts)
    _check_times(draft)
    _check_together(draft)
    return _seal(draft, keyring, max_payload_bytes, is_fanout=is_fanout) if topic.encrypted else draft


def _seal(draft: Draft, keyring: Keyring | None, max_payload_bytes: int, *, is_fanout: bool) -> Draft:
    if keyring is None:
        raise ConfigurationError(f"topic {draft.topic!r} is encrypted: set PGOUTBOX_ENCRYPTION_KEYS")
    identity = Identity(
        "fan-out" if is_fanout else "payload", draft.topic, draft.destination, draft.coalesce_key, draft.ordering_key
    )
    sealed = keyring.seal(draft.payload, identity, dedupe_key=draft.dedupe_key)
    _check_sealed("payload", sealed, max_payload_bytes)
    return draft._replace(payload=sealed)


def _check_sealed(field: str, sealed: str, max_bytes: int) -> None:
    if len(sealed) > max_bytes:
        raise PayloadError(
            field, f"has {len(sealed)} bytes encrypted, the limit is {max_bytes} (PGOUTBOX_MAX_PAYLOAD_BYTES)"
        )


def prepare_fanout(
    message: NewMessage[P],
    topic: Topic[P],
    destinations: Iterable[str],
    content: object,
    *,
    max_attempts: int | None,
    max_payload_bytes: int,
    serializer: Serializer | None,
    keyring: Keyring | None = None,
) -> Fanout:
    """Check a fan-out: `prepare` for what its messages have in common, and each destination.

    Its messages have no keys: a topic with keys or a destination of its own is refused.
    """
    if topic.destination is not None:
        raise _owned(topic, "destination")
    draft = prepare(
        message,
        topic,
        max_attempts=max_attempts,
        max_payload_bytes=max_payload_bytes,
        serializer=serializer,
        keyring=keyring,
        is_fanout=True,
    )
    for field in ("coalesce_key", "dedupe_key", "ordering_key"):
        if getattr(draft, field) is not None:
            raise PayloadError(field, "the messages of a fan-out have no keys; use enqueue_many")
    if isinstance(destinations, (str, bytes)):
        raise PayloadError("destinations", "must be several texts, not one")
    shared = to_json(content, max_bytes=max_payload_bytes, serializer=serializer, field="content")
    if topic.encrypted and keyring is not None:
        shared = keyring.seal(shared, Identity("content", topic.name), dedupe_key=None)
        _check_sealed("content", shared, max_payload_bytes)
    return Fanout(
        topic=draft.topic,
        payload=draft.payload,
        destinations=[_check_destination(f"destinations[{i}]", d) for i, d in enumerate(destinations)],
        content=None if content is None else shared,
        queue=draft.queue,
        available_at=draft.available_at,
        delay_seconds=draft.delay_seconds,
        expires_at=draft.expires_at,
        expires_after_seconds=draft.expires_after_seconds,
        headers=draft.headers,
        max_attempts=draft.max_attempts,
    )


def _settled(topic: Topic[P], message: NewMessage[P], payload: P) -> Iterator[object]:
    """The options in the order of `_RULES`. What the topic's definition says must not be given again."""
    for field, owner in (
        ("available_at", topic.delay),
        ("expires_at", topic.expires_after),
        ("max_attempts", topic.retry),
    ):
        if owner is not None and getattr(message, field) is not None:
            raise _owned(topic, field)
    for rule in _RULES:
        owner, given = getattr(topic, rule.field, None), getattr(message, rule.field, None)
        if owner is not None and given is not None:
            raise _owned(topic, rule.field)
        yield given if owner is None else owner(payload) if callable(owner) else owner


def _owned(topic: Topic[P], field: str) -> PayloadError:
    return PayloadError(field, f"belongs to the definition of topic {topic.name!r}; do not pass it")


class Chunk(NamedTuple):
    """The positions of some drafts, and the parameters of `sql.ENQUEUE_MANY` for them, but for the last."""

    positions: Sequence[int]
    parameters: tuple[object, ...]


def chunks(drafts: Sequence[tuple[object, ...]]) -> Iterator[Chunk]:
    """The drafts, in pieces that one statement takes.

    All drafts with keys that enqueue locks come last, sorted over the whole call as `pgoutbox.enqueue_many` sorts
    within one: every transaction then takes the keys in the same order, and two bulks never wait for each other in a
    circle. An array that no draft of the call uses is None.
    """
    if not drafts:
        return
    # A draft whose fields are columns.
    columns = Draft._make(None if column.count(None) == len(column) else column for column in zip(*drafts, strict=True))
    order = _locking_order(columns)
    start = characters = 0
    for end, position in enumerate(order):
        size = len(columns.payload[position])
        characters += size
        if end > start and (end - start == CHUNK_ROWS or characters > CHUNK_CHARACTERS):
            yield Chunk(order[start:end], _parameters(columns, order[start:end]))
            start, characters = end, size
    yield Chunk(order[start:], _parameters(columns, order[start:]))


def _locking_order(columns: Draft) -> Sequence[int]:
    everything = range(len(columns.topic))
    if columns.coalesce_key is None and columns.dedupe_key is None and columns.ordering_key is None:
        return everything
    names = (
        columns.topic,
        columns.queue,
        columns.coalesce_key,
        columns.dedupe_key,
        columns.ordering_key,
        columns.coalesce_rule,
    )
    locks = list(map(_lock, *(itertools.repeat(None) if column is None else column for column in names)))
    return sorted(everything, key=locks.__getitem__)


def _lock(
    topic: str,
    queue: str | None,
    coalesce_key: str | None,
    dedupe_key: str | None,
    ordering_key: str | None,
    coalesce_rule: str | None,
) -> str:
    """The place of a draft in the order in which keys are locked, empty for a draft without such a key.

    As in pgoutbox.enqueue_many: ordering keys, coalesce keys, dedupe keys. PostgreSQL sorts text of the collation "C"
    by code point, as Python does. NUL, which no key holds, sorts before all others. Messages of one coalesce or
    ordering key keep their order.
    """
    if ordering_key is not None:
        return f"1{queue or 'default'}\0{ordering_key}"
    if coalesce_key is not None and coalesce_rule != "pending":
        return f"2{topic}\0{coalesce_key}"
    return "" if dedupe_key is None else f"3{topic}\0{dedupe_key}"


def _parameters(columns: Draft, positions: Sequence[int]) -> tuple[object, ...]:
    """Two texts of lines, then arrays. An array of texts is written here, because drivers are slow at that."""
    parameters: list[object] = []
    for field, column in zip(Draft._fields, cast("Sequence[Sequence[Any] | None]", columns), strict=True):
        if column is None:
            parameters.append(None)
            continue
        values = [column[position] for position in positions]
        if field in _LINES:
            parameters.append("\n".join(values))
        else:
            parameters.append(values if field in _NOT_TEXTS else text_array(values))
    return tuple(parameters)


def text_array(texts: Sequence[str | None]) -> str:
    """Return the array in PostgreSQL's text form. No element holds NUL, because PostgreSQL cannot store it."""
    if None in texts:
        return "{" + ",".join(["NULL" if text is None else _quoted(text) for text in texts]) + "}"
    # Escaped all at once: NUL stands between the elements.
    return "{" + _quoted("\0".join(cast("Sequence[str]", texts))).replace("\0", '","') + "}"


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


# --- options ----------------------------------------------------------------------------------------------------------


def check_name(field: str, value: object) -> str:
    """A topic or a queue: what the SQL function accepts as a name."""
    if not isinstance(value, str) or _NAME.fullmatch(value) is None:
        raise PayloadError(
            field,
            f"must be 1 to 63 of a-z, 0-9, underscore, dot and hyphen, the first a letter, not {shown(value)}",
        )
    return value


def check_key(field: str, value: object) -> str:
    """A coalesce, dedupe or ordering key. An empty one is a mistake: strangers' messages would share it."""
    if not isinstance(value, str):
        raise PayloadError(field, f"must be text, not {type(value).__name__}")
    if not value:
        raise PayloadError(field, "must not be empty; pass None for no key")
    if len(value) <= MAX_KEY_BYTES and value.isascii() and "\0" not in value:
        return value
    check_storable(field, value)
    size = len(value.encode())
    if size > MAX_KEY_BYTES:
        raise PayloadError(field, f"has {size} bytes, the limit is {MAX_KEY_BYTES}")
    return value


def _check_destination(field: str, value: object) -> str:
    if not isinstance(value, str):
        raise PayloadError(field, f"must be text, not {type(value).__name__}")
    check_storable(field, value)
    if _DESTINATION.fullmatch(value) is None:
        raise PayloadError(
            field, f"must be a URI such as mailto:a@example.org, without control characters, not {shown(value)}"
        )
    if "," in value and value[:7].lower() == "mailto:":
        raise PayloadError(
            field, "must name one recipient, without a comma; enqueue one message for each, or render Email(to=[...])"
        )
    size = len(value.encode())
    if size > MAX_DESTINATION_BYTES:
        raise PayloadError(field, f"has {size} bytes, the limit is {MAX_DESTINATION_BYTES}")
    return value


def _check_headers(field: str, value: object) -> str:
    if not isinstance(value, Mapping):
        raise PayloadError(field, f"must be a mapping of text to text, not {type(value).__name__}")
    if len(value) > MAX_HEADER_COUNT:
        raise PayloadError(field, f"has {len(value)} entries, the limit is {MAX_HEADER_COUNT}")
    for name, text in value.items():
        if not isinstance(name, str) or not name or _UNSAFE.search(name):
            raise PayloadError(member(field, name), "a name must be text, not empty and without control characters")
        if not isinstance(text, str) or _UNSAFE.search(text):
            raise PayloadError(member(field, name), "must be text without control characters")
    text = encode_json(dict(value)).decode()
    size = len(text.encode())
    if size > MAX_HEADER_BYTES:
        raise PayloadError(field, f"has {size} bytes as JSON, the limit is {MAX_HEADER_BYTES}")
    return text


def check_whole(field: str, value: object, *, most: int) -> int:
    """A whole number from 1 to `most`."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise PayloadError(field, f"must be a whole number from 1 to {most}, not {shown(value)}")
    return value


def _check_redact(field: str, value: object) -> None:
    if not isinstance(value, tuple):
        raise PayloadError(field, f"must be a tuple of names, not {shown(value)}")
    try:
        for name in value:
            check_redacted_name(name)
    except ValueError as error:
        raise PayloadError(field, str(error)) from None


def _check_max_attempts(field: str, value: object) -> int:
    return check_whole(field, value, most=MAX_ATTEMPTS_BOUND)


def _check_delay(field: str, value: object) -> float:
    limit = MAX_DELAY.total_seconds()
    if isinstance(value, timedelta):
        seconds = value.total_seconds()
    elif isinstance(value, (int, float)) and not isinstance(value, bool) and -1 < value <= limit:
        seconds = float(value)
    else:
        seconds = math.nan
    if not 0 <= seconds <= limit:
        raise PayloadError(field, f"must be from 0 to {limit:.0f} seconds, or such a timedelta, not {shown(value)}")
    return seconds


def _check_available_at(field: str, value: object) -> datetime:
    moment = _moment(field, value)
    if moment > datetime.now(UTC) + _MAX_AHEAD + _CLOCK_TOLERANCE:
        raise PayloadError(field, f"must not be more than 10 years ahead: {moment.isoformat()}")
    return moment


def _check_expires_at(field: str, value: object) -> datetime:
    moment = _moment(field, value)
    now = datetime.now(UTC)
    if moment > now + 2 * _MAX_AHEAD:
        raise PayloadError(field, f"must not be more than 20 years ahead: {moment.isoformat()}")
    if moment < now - _CLOCK_TOLERANCE:
        raise PayloadError(field, f"is in the past: {moment.isoformat()}")
    return moment


def _moment(field: str, value: object) -> datetime:
    if not isinstance(value, datetime):
        raise PayloadError(field, f"must be a datetime, not {type(value).__name__}")
    if value.utcoffset() is None:
        raise PayloadError(field, f"timezone required: {value.isoformat()} is naive")
    # Whatever is past means now, and years near the ends of the calendar have no equivalent in other time zones.
    return max(value, _EPOCH).astimezone(UTC) if value.year < MAXYEAR else value


def _check_times(draft: Draft) -> None:
    if draft.available_at is not None and draft.delay_seconds is not None:
        raise PayloadError("delay", "give delay or available_at, not both")
    if draft.expires_at is None:
        return
    if draft.available_at is not None and draft.expires_at <= draft.available_at:
        raise PayloadError("expires_at", "must be later than available_at")
    if draft.delay_seconds is not None:
        due_at = datetime.now(UTC) + timedelta(seconds=draft.delay_seconds)
        if draft.expires_at < due_at - _CLOCK_TOLERANCE:
            raise PayloadError("expires_at", "must be later than the end of the delay")


def _check_on_failed(field: str, value: object) -> str:
    if value not in get_args(OnFailed):
        raise PayloadError(field, f"must be continue or halt, not {shown(value)}")
    return str(value)


def _check_coalesce_rule(field: str, value: object) -> str:
    if value not in get_args(CoalesceRule):
        raise PayloadError(field, f"must be newest or pending, not {shown(value)}")
    return str(value)


def _check_together(draft: Draft) -> None:
    if draft.ordering_key is not None and draft.coalesce_key is not None:
        raise PayloadError("ordering_key", _NOT_BOTH)
    if draft.on_failed is not None and draft.ordering_key is None:
        raise PayloadError("on_failed", "only together with ordering_key")
    if draft.max_delay_seconds is not None and draft.coalesce_key is None:
        raise PayloadError("max_delay", "only together with coalesce_key")
    if draft.coalesce_rule is not None and draft.coalesce_key is None:
        raise PayloadError("coalesce_rule", "only together with coalesce_key")
    if draft.max_delay_seconds is not None and draft.coalesce_rule == "pending":
        raise PayloadError("max_delay", _NO_DEBOUNCE)


_LINES: Final = frozenset({"topic", "payload"})
_NOT_TEXTS: Final = frozenset(
    {"available_at", "delay_seconds", "expires_at", "expires_after_seconds", "max_attempts", "max_delay_seconds"}
)


class _Rule(NamedTuple):
    """An option and what checks it."""

    field: str
    check: Callable[[str, object], object]


# In the order of the fields of `Draft`.
_RULES: Final = (
    _Rule("queue", check_name),
    _Rule("destination", _check_destination),
    _Rule("coalesce_key", check_key),
    _Rule("dedupe_key", check_key),
    _Rule("available_at", _check_available_at),
    _Rule("delay", _check_delay),
    _Rule("expires_at", _check_expires_at),
    _Rule("expires_after", _check_delay),
    _Rule("headers", _check_headers),
    _Rule("max_attempts", _check_max_attempts),
    _Rule("ordering_key", check_key),
    _Rule("on_failed", _check_on_failed),
    _Rule("max_delay", _check_delay),
    _Rule("coalesce_rule", _check_coalesce_rule),
)


def _if_given(check: Callable[[str, object], V], field: str, value: object) -> V | None:
    return None if value is None else check(field, value)
