"""Checks of new messages before any SQL, and the split of bulks into statements. Pure: no I/O.

A mistake raises `ArgumentError` with the path of the invalid value, so that the caller's transaction stays usable. An
accepted payload comes back from PostgreSQL unchanged, except that a tuple comes back as a list.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from pydantic_core import to_json as encode_json

from pgoutbox.encryption import Identity, Keyring
from pgoutbox.enqueue.payloads import Serializer, fit, to_json
from pgoutbox.errors import ArgumentError, ConfigurationError
from pgoutbox.message import P
from pgoutbox.options import (
    KEYS,
    MAX_HEADER_BYTES,
    MAX_HEADER_COUNT,
    OPTIONS,
    REPLACED,
    MessageOptions,
    check_destination,
    check_together,
)
from pgoutbox.topics import NewMessage, Recipient, Topic

CHUNK_ROWS: Final = 5_000
CHUNK_CHARACTERS: Final = 16_000_000
# An array of `jsonb` has at most 268,435,455 bytes. A number takes up to six times as many as characters.
KEYED_CHARACTERS: Final = 40_000_000

# The options that each destination of a fan-out can have of its own.
_OWN_OPTIONS: Final = ("destination", "owner", "available_at", "delay", "headers")


class Draft(NamedTuple):
    """A checked message, as `Outbox.draft` returns it.

    The payload is JSON text. The options have their names in `options.OPTIONS`, and each is a JSON value.
    """

    topic: str
    payload: str
    options: Mapping[str, Any]

    @property
    def options_json(self) -> str | None:
        """The options as JSON text, None without any."""
        return encode_json(self.options).decode() if self.options else None


class Route(NamedTuple):
    """What `prepare` needs besides the messages of one topic. `max_attempts` is the default limit."""

    topic: Topic[Any]
    max_attempts: int | None
    max_payload_bytes: int
    serializer: Serializer | None = None
    keyring: Keyring | None = None


def carrying(message: NewMessage[P], context: Mapping[str, str]) -> NewMessage[P]:
    """Return the message with the headers of a trace, if it has none of its own and there is room for them.

    `prepare` reports invalid headers of the message. A trace never makes a message invalid.
    """
    if not context:
        return message
    headers: object = message.options.get("headers", {})
    if not isinstance(headers, Mapping) or len(headers) + len(context) > MAX_HEADER_COUNT:
        return message
    if len(repr(headers)) > MAX_HEADER_BYTES // 2 or not context.keys().isdisjoint(headers):
        return message
    options: MessageOptions = {**message.options, "headers": {**headers, **context}}
    return NewMessage(message.topic, message.payload, **options)


def prepare(message: NewMessage[P], route: Route, *, is_fanout: bool = False) -> Draft:
    """Check a message, and complete it from its topic's definition.

    Raises `ArgumentError` with the path of the invalid value, and `ConfigurationError` for an encrypted topic without a
    keyring. Errors of the topic's functions and of the serializer pass through.
    """
    topic, max_attempts, max_payload_bytes, serializer, _ = route
    payload = message.payload if topic.payload is None else fit(topic.payload, message.payload)
    text = to_json(payload, max_bytes=max_payload_bytes, serializer=serializer)
    options: dict[str, Any] = {} if max_attempts is None else {"max_attempts": max_attempts}
    if topic.has_options or topic.encrypted or message.options:
        for name, value in _settled(topic, message, payload):
            options[name] = OPTIONS[name](name, value)
        check_together(options)
        if topic.encrypted:
            text = _seal(text, route, options, is_fanout=is_fanout)
    return Draft(topic.name, text, options)


def _settled(topic: Topic[P], message: NewMessage[P], payload: P) -> Iterator[tuple[str, object]]:
    """Yield the options that are given. Options of the topic's definition must not be given again."""
    if topic.has_options:
        for name in message.options:
            _require_open(topic, name)
    for name in OPTIONS:
        value = getattr(topic, name, None)
        if value is None:
            value = message.options.get(name)
        elif callable(value):
            value = value(payload)
        if value is not None:
            yield name, value


def _require_open(topic: Topic[Any], option: str) -> None:
    """Refuse an option of a message that belongs to the definition of its topic."""
    if getattr(topic, option, None) is not None or getattr(topic, REPLACED.get(option, option), None) is not None:
        raise ArgumentError(option, f"belongs to the definition of topic {topic.name!r}; do not pass it")


def _seal(text: str, route: Route, options: Mapping[str, Any], *, is_fanout: bool) -> str:
    topic, keyring = route.topic, route.keyring
    if keyring is None:
        raise ConfigurationError(f"topic {topic.name!r} is encrypted: set PGOUTBOX_ENCRYPTION_KEYS")
    identity = Identity(
        "fan-out" if is_fanout else "payload",
        topic.name,
        options.get("destination"),
        options.get("coalesce_key"),
        options.get("ordering_key"),
    )
    sealed = keyring.seal(text, identity, dedupe_key=options.get("dedupe_key"))
    return _sized("payload", sealed, route)


def _sized(field: str, sealed: str, route: Route) -> str:
    limit = route.max_payload_bytes
    if len(sealed) > limit:
        raise ArgumentError(
            field, f"has {len(sealed)} bytes encrypted, the limit is {limit} (PGOUTBOX_MAX_PAYLOAD_BYTES)"
        )
    return sealed


# --- fan-outs ---------------------------------------------------------------------------------------------------------


class Fanout(NamedTuple):
    """A checked fan-out: JSON texts for `sql.ENQUEUE_FANOUT`. The destinations are an array with `size` elements."""

    message: str
    destinations: str
    content: str | None
    size: int


def prepare_fanout(
    message: NewMessage[P], route: Route, destinations: Iterable[str | Recipient], content: object
) -> Fanout:
    """Check a fan-out: the common parts of its messages like `prepare`, and each destination with its own parts.

    Its messages have no keys: a topic with keys or a destination of its own is refused.
    """
    topic, _, max_payload_bytes, serializer, keyring = route
    _require_open(topic, "destination")
    draft = prepare(message, route, is_fanout=True)
    for field in KEYS:
        if field in draft.options:
            raise ArgumentError(field, "the messages of a fan-out have no keys; use enqueue_many")
    if isinstance(destinations, (str, bytes)):
        raise ArgumentError("destinations", "must be several texts, not one")
    shared = to_json(content, max_bytes=max_payload_bytes, serializer=serializer, field="content")
    if topic.encrypted and keyring is not None:
        shared = _sized("content", keyring.seal(shared, Identity("content", topic.name), dedupe_key=None), route)
    parts = [_part_of(recipient, index, draft, route) for index, recipient in enumerate(destinations)]
    return Fanout(message_json(draft), f"[{','.join(parts)}]", None if content is None else shared, len(parts))


def _part_of(recipient: str | Recipient, index: int, common: Draft, route: Route) -> str:
    """Return the parts of one destination as JSON text."""
    place = f"destinations[{index}]"
    if not isinstance(recipient, Recipient):
        return encode_json(check_destination(place, recipient)).decode()
    topic = route.topic
    own = {name: value for name in _OWN_OPTIONS if (value := getattr(recipient, name)) is not None}
    text = None
    try:
        for name in own:
            _require_open(topic, name)
        if recipient.payload is not None:
            payload = recipient.payload if topic.payload is None else fit(topic.payload, recipient.payload)
            text = to_json(payload, max_bytes=route.max_payload_bytes, serializer=route.serializer)
            if topic.owner is not None and (owner := topic.owner(payload)) is not None:
                own["owner"] = owner
        options = {name: OPTIONS[name](name, value) for name, value in own.items()}
        check_together({name: common.options[name] for name in common.options.keys() - _OWN_OPTIONS} | options)
        if text is not None and topic.encrypted:
            text = _seal(text, route, common.options, is_fanout=True)
    except ArgumentError as error:
        raise ArgumentError(f"{place}.{error.field}", error.reason) from error.__cause__
    return _json_of(options, {} if text is None else {"payload": text})


# --- bulks ------------------------------------------------------------------------------------------------------------


class Bulk:
    """The messages of one call as JSON texts, by position. The garbage collector has only texts to visit."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._keyed: list[int] = []

    def __len__(self) -> int:
        return len(self._texts)

    def add(self, draft: Draft) -> None:
        """Append a message."""
        if not draft.options.keys().isdisjoint(KEYS):
            self._keyed.append(len(self._texts))
        self._texts.append(message_json(draft))

    def chunks(self) -> Iterator[tuple[Sequence[int], str]]:
        """Yield the positions of some messages, and these as a JSON array, for one statement each.

        All messages with keys are in the last one, which locks their keys in one order: so two bulks never deadlock.
        Only if they have more than `KEYED_CHARACTERS` it takes several.
        """
        keyed = set(self._keyed)
        plain = [position for position in range(len(self)) if position not in keyed] if keyed else range(len(self))
        yield from self._pieces(plain, CHUNK_ROWS, CHUNK_CHARACTERS)
        yield from self._pieces(self._keyed, len(self), KEYED_CHARACTERS)

    def _pieces(
        self, positions: Sequence[int], max_rows: int, max_characters: int
    ) -> Iterator[tuple[Sequence[int], str]]:
        start = characters = 0
        for end, position in enumerate(positions):
            size = len(self._texts[position])
            characters += size
            if end > start and (end - start == max_rows or characters > max_characters):
                yield positions[start:end], self._array(positions[start:end])
                start, characters = end, size
        if positions:
            yield positions[start:], self._array(positions[start:])

    def _array(self, positions: Sequence[int]) -> str:
        return f"[{','.join([self._texts[position] for position in positions])}]"


def message_json(draft: Draft) -> str:
    """Return the message as one JSON object, as `pgoutbox.enqueue_many` takes it."""
    return _json_of(draft.options, {"topic": f'"{draft.topic}"', "payload": draft.payload})


def _json_of(options: Mapping[str, Any], texts: Mapping[str, str]) -> str:
    """Return a JSON object of options and of further values that are JSON texts."""
    members = [f'"{name}":{text}' for name, text in texts.items()]
    if options:
        members.append(encode_json(options).decode()[1:-1])
    return f"{{{','.join(members)}}}"
