"""Checks of new messages before any SQL, and the split of bulks into statements. Pure: no I/O.

A mistake raises `ArgumentError` with the path of the invalid value, so that the caller's transaction stays usable. An
accepted payload comes back from PostgreSQL unchanged, except that a tuple comes back as a list.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from operator import attrgetter
from typing import Any, Final, NamedTuple, cast

from pgoutbox.encryption import Identity, Keyring
from pgoutbox.enqueue.payloads import Serializer, fit, to_json
from pgoutbox.errors import ArgumentError, ConfigurationError
from pgoutbox.message import P
from pgoutbox.options import (
    CLOCK_TOLERANCE,
    MAX_HEADER_BYTES,
    MAX_HEADER_COUNT,
    check_available_at,
    check_delay,
    check_destination,
    check_expires_at,
    check_headers,
    check_key,
    check_max_attempts,
    check_name,
    check_owner,
    if_given,
)
from pgoutbox.topics import (
    NOT_BOTH,
    NewMessage,
    Recipient,
    Topic,
    check_on_duplicate,
    check_on_failed,
)

CHUNK_ROWS: Final = 5_000
CHUNK_CHARACTERS: Final = 16_000_000


class ValidatedMessage(NamedTuple):
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
    owner: str | None = None
    on_duplicate: str | None = None


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
    owner: str | None
    payloads: list[str | None] | None
    headers_each: list[str | None] | None
    available_ats: list[datetime | None] | None
    delays: list[float | None] | None
    owners: list[str | None] | None


class Route(NamedTuple):
    """What `prepare` needs besides the messages of one topic. `max_attempts` is the default limit."""

    topic: Topic[Any]
    max_attempts: int | None
    max_payload_bytes: int
    serializer: Serializer | None = None
    keyring: Keyring | None = None


# The options and their checks, in the order of the fields of `ValidatedMessage`.
_CHECKS: Final[Mapping[str, Callable[[str, object], object]]] = {
    "queue": check_name,
    "destination": check_destination,
    "coalesce_key": check_key,
    "dedupe_key": check_key,
    "available_at": check_available_at,
    "delay": check_delay,
    "expires_at": check_expires_at,
    "expires_after": check_delay,
    "headers": check_headers,
    "max_attempts": check_max_attempts,
    "ordering_key": check_key,
    "on_failed": check_on_failed,
    "max_delay": check_delay,
    "owner": check_owner,
    "on_duplicate": check_on_duplicate,
}
# Only a topic has `expires_after`.
_message_options = attrgetter(*(field for field in _CHECKS if field != "expires_after"))
_NO_MESSAGE_OPTIONS = (None,) * 14
_NO_CHECKED_OPTIONS = (None,) * 9
_NO_LAST_OPTIONS = (None,) * 5


def carrying(message: NewMessage[P], context: Mapping[str, str]) -> NewMessage[P]:
    """Return the message with the headers of a trace, if it has none of its own and there is room for them.

    `prepare` reports invalid headers of the message. A trace never makes a message invalid.
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


def prepare(message: NewMessage[P], route: Route, *, is_fanout: bool = False) -> ValidatedMessage:
    """Check a message, and complete it from its topic's definition.

    Raises `ArgumentError` with the path of the invalid value, and `ConfigurationError` for an encrypted topic without a
    keyring. Errors of the topic's functions and of the serializer pass through.
    """
    topic, max_attempts, max_payload_bytes, serializer, keyring = route
    payload = message.payload if topic.payload is None else fit(topic.payload, message.payload)
    text = to_json(payload, max_bytes=max_payload_bytes, serializer=serializer)
    given = _message_options(message)
    if given == _NO_MESSAGE_OPTIONS and not topic.has_options and not topic.encrypted:
        return ValidatedMessage._make((topic.name, text, *_NO_CHECKED_OPTIONS, max_attempts, *_NO_LAST_OPTIONS))

    options = _settled(topic, message, payload) if topic.has_options else (*given[:7], None, *given[7:])
    checked = [
        None if value is None else check(field, value)
        for (field, check), value in zip(_CHECKS.items(), options, strict=True)
    ]
    draft = ValidatedMessage._make((topic.name, text, *checked))
    if max_attempts is not None and draft.max_attempts is None:
        draft = draft._replace(max_attempts=max_attempts)
    _check_times(draft)
    _check_together(draft)
    return _seal(draft, keyring, max_payload_bytes, is_fanout=is_fanout) if topic.encrypted else draft


def _seal(
    draft: ValidatedMessage, keyring: Keyring | None, max_payload_bytes: int, *, is_fanout: bool
) -> ValidatedMessage:
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
        raise ArgumentError(
            field, f"has {len(sealed)} bytes encrypted, the limit is {max_bytes} (PGOUTBOX_MAX_PAYLOAD_BYTES)"
        )


def prepare_fanout(
    message: NewMessage[P], route: Route, destinations: Iterable[str | Recipient], content: object
) -> Fanout:
    """Check a fan-out: the common parts of its messages like `prepare`, and each destination with its own parts.

    Its messages have no keys: a topic with keys or a destination of its own is refused.
    """
    topic, _, max_payload_bytes, serializer, keyring = route
    if topic.destination is not None:
        raise _owned(topic, "destination")
    draft = prepare(message, route, is_fanout=True)
    for field in ("coalesce_key", "dedupe_key", "ordering_key"):
        if getattr(draft, field) is not None:
            raise ArgumentError(field, "the messages of a fan-out have no keys; use enqueue_many")
    if isinstance(destinations, (str, bytes)):
        raise ArgumentError("destinations", "must be several texts, not one")
    shared = to_json(content, max_bytes=max_payload_bytes, serializer=serializer, field="content")
    if topic.encrypted and keyring is not None:
        shared = keyring.seal(shared, Identity("content", topic.name), dedupe_key=None)
        _check_sealed("content", shared, max_payload_bytes)
    parts = [_part_of(recipient, index, draft, route) for index, recipient in enumerate(destinations)]
    columns = zip(*parts, strict=True) if parts else [()] * len(_Part._fields)
    names, *own = ([*column] for column in columns)
    shared_fields: dict[str, Any] = {name: value for name, value in draft._asdict().items() if name in Fanout._fields}
    for field, values in zip(_OWN_PARTS, own, strict=True):
        shared_fields[field] = None if values.count(None) == len(values) else values
    return Fanout(
        **shared_fields,
        destinations=names,
        content=None if content is None else shared,
    )


class _Part(NamedTuple):
    """The checked parts of one destination; None means that of the fan-out."""

    destination: str
    payload: str | None = None
    headers: str | None = None
    available_at: datetime | None = None
    delay_seconds: float | None = None
    owner: str | None = None


_OWN_PARTS: Final = ("payloads", "headers_each", "available_ats", "delays", "owners")


def _part_of(recipient: str | Recipient, index: int, common: ValidatedMessage, route: Route) -> _Part:
    place = f"destinations[{index}]"
    if not isinstance(recipient, Recipient):
        return _Part(check_destination(place, recipient))
    topic = route.topic
    try:
        for field in ("available_at", "delay"):
            if topic.delay is not None and getattr(recipient, field) is not None:
                raise _owned(topic, field)
        if topic.owner is not None and recipient.owner is not None:
            raise _owned(topic, "owner")
        payload, owner = None, if_given(check_owner, "owner", recipient.owner)
        if recipient.payload is not None:
            own = recipient.payload if topic.payload is None else fit(topic.payload, recipient.payload)
            payload = to_json(own, max_bytes=route.max_payload_bytes, serializer=route.serializer)
            if topic.owner is not None:
                owner = if_given(check_owner, "owner", topic.owner(own))
            if topic.encrypted:
                draft = common._replace(payload=payload)
                payload = _seal(draft, route.keyring, route.max_payload_bytes, is_fanout=True).payload
        part = _Part(
            check_destination("destination", recipient.destination),
            payload,
            if_given(check_headers, "headers", recipient.headers),
            if_given(check_available_at, "available_at", recipient.available_at),
            if_given(check_delay, "delay", recipient.delay),
            owner,
        )
        _check_times(common._replace(available_at=part.available_at, delay_seconds=part.delay_seconds))
    except ArgumentError as error:
        raise ArgumentError(f"{place}.{error.field}", error.reason) from error.__cause__
    return part


def _settled(topic: Topic[P], message: NewMessage[P], payload: P) -> Iterator[object]:
    """Return the options in the order of `_CHECKS`. Options of the topic's definition must not be given again."""
    for field, defined in (
        ("available_at", topic.delay),
        ("expires_at", topic.expires_after),
        ("max_attempts", topic.retry),
    ):
        if defined is not None and getattr(message, field) is not None:
            raise _owned(topic, field)
    for field in _CHECKS:
        defined, given = getattr(topic, field, None), getattr(message, field, None)
        if defined is not None and given is not None:
            raise _owned(topic, field)
        yield given if defined is None else defined(payload) if callable(defined) else defined


def _owned(topic: Topic[P], field: str) -> ArgumentError:
    return ArgumentError(field, f"belongs to the definition of topic {topic.name!r}; do not pass it")


class Chunk(NamedTuple):
    """The positions of some drafts, and their parameters of `sql.ENQUEUE_MANY` without the last one."""

    positions: Sequence[int]
    parameters: tuple[object, ...]


def chunks(drafts: Sequence[tuple[object, ...]]) -> Iterator[Chunk]:
    """Return the drafts in pieces, one for each statement.

    All drafts with keys come last, sorted over the whole call in the order of `pgoutbox.enqueue_many`. So every
    transaction locks the keys in the same order, and two bulks never deadlock. An array that no draft of the call uses
    is None.
    """
    if not drafts:
        return
    # A draft whose fields are columns.
    columns = ValidatedMessage._make(
        None if column.count(None) == len(column) else column for column in zip(*drafts, strict=True)
    )
    order = _locking_order(columns)
    start = characters = 0
    for end, position in enumerate(order):
        size = len(columns.payload[position])
        characters += size
        if end > start and (end - start == CHUNK_ROWS or characters > CHUNK_CHARACTERS):
            yield Chunk(order[start:end], _parameters(columns, order[start:end]))
            start, characters = end, size
    yield Chunk(order[start:], _parameters(columns, order[start:]))


def _locking_order(columns: ValidatedMessage) -> Sequence[int]:
    everything = range(len(columns.topic))
    if columns.coalesce_key is None and columns.dedupe_key is None and columns.ordering_key is None:
        return everything
    names = (
        columns.topic,
        columns.queue,
        columns.coalesce_key,
        columns.dedupe_key,
        columns.ordering_key,
    )
    locks = list(map(_lock, *(itertools.repeat(None) if column is None else column for column in names)))
    return sorted(everything, key=locks.__getitem__)


def _lock(
    topic: str,
    queue: str | None,
    coalesce_key: str | None,
    dedupe_key: str | None,
    ordering_key: str | None,
) -> str:
    """Return the sort key of a draft in the order of locks; it is empty for a draft without such a key.

    As in pgoutbox.enqueue_many: ordering keys, coalesce keys, dedupe keys. PostgreSQL sorts text of the collation "C"
    by code point, as Python does. NUL, which no key contains, sorts before all others. Messages of one coalesce or
    ordering key keep their order.
    """
    if ordering_key is not None:
        return f"1{queue or 'default'}\0{ordering_key}"
    if coalesce_key is not None:
        return f"2{topic}\0{coalesce_key}"
    return "" if dedupe_key is None else f"3{topic}\0{dedupe_key}"


def _parameters(columns: ValidatedMessage, positions: Sequence[int]) -> tuple[object, ...]:
    """Return two texts of lines, then arrays. Arrays of texts are written here, because drivers are slow at that."""
    parameters: list[object] = []
    for field, column in zip(ValidatedMessage._fields, cast("Sequence[Sequence[Any] | None]", columns), strict=True):
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
    # All elements are escaped at once, with NUL between them.
    return "{" + _quoted("\0".join(cast("Sequence[str]", texts))).replace("\0", '","') + "}"


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


# --- options ----------------------------------------------------------------------------------------------------------


def _check_times(draft: ValidatedMessage) -> None:
    if draft.available_at is not None and draft.delay_seconds is not None:
        raise ArgumentError("delay", "give delay or available_at, not both")
    if draft.expires_at is None:
        return
    if draft.available_at is not None and draft.expires_at <= draft.available_at:
        raise ArgumentError("expires_at", "must be later than available_at")
    if draft.delay_seconds is not None:
        due_at = datetime.now(UTC) + timedelta(seconds=draft.delay_seconds)
        if draft.expires_at < due_at - CLOCK_TOLERANCE:
            raise ArgumentError("expires_at", "must be later than the end of the delay")


def _check_together(draft: ValidatedMessage) -> None:
    if draft.ordering_key is not None and draft.coalesce_key is not None:
        raise ArgumentError("ordering_key", NOT_BOTH)
    if draft.on_failed is not None and draft.ordering_key is None:
        raise ArgumentError("on_failed", "only together with ordering_key")
    if draft.max_delay_seconds is not None and draft.coalesce_key is None:
        raise ArgumentError("max_delay", "only together with coalesce_key")
    if draft.on_duplicate is not None and draft.dedupe_key is None:
        raise ArgumentError("on_duplicate", "only together with dedupe_key")


_LINES: Final = frozenset({"topic", "payload"})
_NOT_TEXTS: Final = frozenset(
    {"available_at", "delay_seconds", "expires_at", "expires_after_seconds", "max_attempts", "max_delay_seconds"}
)
