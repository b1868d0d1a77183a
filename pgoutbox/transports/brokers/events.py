"""The event and its bytes on the wire: a CloudEvent 1.0 in structured or binary mode. Pure: no I/O, needs no extra.

Every broker gets the same bytes, so that a consumer can read an event from any broker. In binary mode only the names of
the headers differ, by the protocol binding of each broker. `render` refuses, naming the field, values that a broker
would refuse, or would not read as a name.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC
from typing import TYPE_CHECKING, Any, Final, Literal
from urllib.parse import unquote

from pydantic import BaseModel, JsonValue

from pgoutbox.message import Message, Permanent, Unavailable
from pgoutbox.transports.checks import encode_json, encode_text, refuse_characters, require_text

if TYPE_CHECKING:
    from pgoutbox.settings import Settings
    from pgoutbox.transports import Content

CONTENT_TYPE: Final = "application/cloudevents+json; charset=UTF-8"
# AMQP counts the length of a name in one byte, and Kafka allows 249 of them.
MAX_NAME_BYTES: Final = 255
MAX_HEADER_COUNT: Final = 64
MAX_HEADER_BYTES: Final = 1_024
_SOURCE_KEY: Final = "event:PGOUTBOX_EVENT_SOURCE"

_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_EXTENSION_NAME = re.compile(r"[a-z0-9]{1,20}")
_HEADER_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_MEDIA_TYPE = re.compile(r"[A-Za-z0-9!#$&^_+.-]+/[A-Za-z0-9!#$&^_+.-]+(?:[ ]?;.*)?")
_JSON_TYPE = re.compile(r"[^/;]+/(?:[^;]+\+)?json(?:[ ]?;.*)?", re.IGNORECASE)

_ATTRIBUTES: Final = frozenset(
    {
        "data", "database64", "datacontenttype", "dataschema", "id", "partitionkey", "source", "specversion", "subject",
        "time", "type",
    }
)  # fmt: skip
# Headers that the transports set, or that a broker reads as a command: Nats-Rollup deletes the messages of a stream.
_RESERVED_HEADERS: Final = frozenset({"content-type", "data", "id"})
_RESERVED_PREFIXES: Final = ("ce-", "ce_", "cc", "bcc", "nats-", "x-")


@dataclass(frozen=True, slots=True)
class CloudEvent:
    """An event for a broker: return it from a handler. The message's destination names the broker.

    It is sent as a CloudEvent 1.0. Its `id` is `message.idempotency_key`, the same at every attempt, and its `time` is
    the message's `created_at`. The default of `type` is the message's topic; the default of `source` is the setting
    `event_source`. `data` is a JSON value, a pydantic model, or bytes of `content_type`. Events with the same `key`
    stay in order: it is the key of a Kafka record, the routing key of RabbitMQ, and everywhere the attribute
    `partitionkey`. `extensions` are further attributes; `headers` are sent outside of the event.

    With `mode="structured"` the body is a JSON envelope of the attributes and the data. With `mode="binary"` the body
    is the data alone, for consumers that expect JSON of their own, and the attributes are headers.

    >>> Event({"order_id": 7}, subject="orders/7", key="7").key
    '7'
    """

    data: JsonValue | BaseModel | bytes = field(default=None, repr=False)
    type: str | None = field(default=None, kw_only=True)
    source: str | None = field(default=None, kw_only=True)
    subject: str | None = field(default=None, kw_only=True)
    key: str | None = field(default=None, kw_only=True)
    content_type: str | None = field(default=None, kw_only=True)
    extensions: Mapping[str, str | int | bool] = field(default_factory=dict, repr=False, kw_only=True)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False, kw_only=True)
    mode: Literal["structured", "binary"] = field(default="structured", kw_only=True)

    @property
    def scheme(self) -> str:
        """Empty: only the message's destination names the broker."""
        return ""


@dataclass(frozen=True, slots=True)
class RenderedEvent:
    """One event as every broker gets it. A broker recognises a repetition by its `id`.

    `content_type` is the type of `content`. Only an event in binary mode has `attributes`.
    """

    id: str
    key: str | None
    content_type: str
    attributes: Mapping[str, str] = field(repr=False)
    headers: Mapping[str, str] = field(repr=False)
    content: bytes = field(repr=False)

    def headers_with(self, prefix: str) -> dict[str, str]:
        """Return the event's own headers, and its attributes with the prefix of the broker's protocol binding."""
        return {**self.headers, **{prefix + name: value for name, value in self.attributes.items()}}


def render(event: Content, message: Message[object], settings: Settings) -> RenderedEvent:
    """Return the bytes that would be sent for this message; connects to nothing.

    Raises `Permanent`, naming the field, for an invalid event. A missing source is `Unavailable`, because the setting
    `event_source` adds it.
    """
    if not isinstance(event, CloudEvent):
        raise Permanent(f"content: a broker's transport sends an Event, not {type(event).__name__}")
    if event.mode not in ("structured", "binary"):
        raise Permanent(f"event.mode: must be structured or binary, not {event.mode!r}")
    attributes = _attributes(event, message, settings)
    data = event.data.model_dump(mode="json") if isinstance(event.data, BaseModel) else event.data
    content_type = _content_type(event, data)
    headers = _headers(event.headers)
    if event.mode == "structured":
        member = {"data_base64": base64.b64encode(data).decode()} if isinstance(data, bytes) else {"data": data}
        envelope = {**attributes, "datacontenttype": content_type, **member}
        content = encode_json("event.data", envelope)
        return RenderedEvent(message.idempotency_key, event.key, CONTENT_TYPE, {}, headers, content)
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in attributes.items()}
    return RenderedEvent(message.idempotency_key, event.key, content_type, texts, headers, _body(data, content_type))


def source_key(event: CloudEvent) -> str | None:
    """Return the key of the breaker for events without a source. It opens while the setting is missing."""
    return _SOURCE_KEY if event.source is None else None


def parse_name(message: Message[object]) -> str:
    """Return the destination without its scheme, percent-decoded: a stream, subject, exchange or topic.

    Raises `Permanent` if it is empty, too long, or the address of a server.
    """
    rest = (message.destination or "").partition(":")[2]
    if rest.startswith("//"):
        raise Permanent("destination: names a server; its address belongs into the settings, not into the message")
    name = unquote(rest, errors="surrogateescape")
    if not name:
        raise Permanent("destination: names nothing after its scheme")
    return check_name("destination", name)


def check_name(field_name: str, name: object, *, max_bytes: int = MAX_NAME_BYTES) -> str:
    """Return the text itself. Raises `Permanent` for control characters, or if it is too long."""
    text = refuse_characters(field_name, require_text(field_name, name), _UNSAFE)
    if (size := len(text.encode())) > max_bytes:
        raise Permanent(f"{field_name}: {size} bytes are more than {max_bytes}")
    return text


def _attributes(event: CloudEvent, message: Message[object], settings: Settings) -> dict[str, str | int]:
    """Return the attributes, except for `datacontenttype`."""
    attributes: dict[str, str | int] = {
        "specversion": "1.0",
        "id": message.idempotency_key,
        "source": _source(event, settings),
        "type": _text("event.type", message.topic if event.type is None else event.type),
        "time": message.created_at.astimezone(UTC).isoformat().replace("+00:00", "Z"),
    }
    if event.subject is not None:
        attributes["subject"] = _text("event.subject", event.subject)
    if event.key is not None:
        attributes["partitionkey"] = _text("event.key", event.key)
    if len(event.extensions) > MAX_HEADER_COUNT:
        raise Permanent(f"event.extensions: {len(event.extensions)} are more than {MAX_HEADER_COUNT}")
    for name, value in event.extensions.items():
        attributes[name] = _extension(name, value)
    return attributes


def _source(event: CloudEvent, settings: Settings) -> str:
    if event.source is not None:
        return _text("event.source", event.source)
    if settings.event_source is None:
        raise Unavailable("event.source: none is given, and PGOUTBOX_EVENT_SOURCE is not set", breaker=_SOURCE_KEY)
    return _text("PGOUTBOX_EVENT_SOURCE", settings.event_source)


def _text(name: str, value: object) -> str:
    if value == "":
        raise Permanent(f"{name}: is empty")
    return check_name(name, value)


def _extension(name: object, value: object) -> str | int:
    where = f"event.extensions[{name!r}]"
    if not isinstance(name, str) or not _EXTENSION_NAME.fullmatch(name):
        raise Permanent(f"{where}: its name must be 1 to 20 lower-case letters and digits")
    if name in _ATTRIBUTES:
        raise Permanent(f"{where}: is an attribute that pgoutbox sets itself")
    if isinstance(value, int):  # A bool is one too.
        if not -(2**31) <= value < 2**31:
            raise Permanent(f"{where}: does not fit into 32 bits")
        return value
    return _text(where, value)


def _headers(headers: Mapping[Any, Any]) -> dict[str, str]:
    if len(headers) > MAX_HEADER_COUNT:
        raise Permanent(f"event.headers: {len(headers)} are more than {MAX_HEADER_COUNT}")
    checked: dict[str, str] = {}
    for name, value in headers.items():
        where = f"event.headers[{name!r}]"
        if not isinstance(name, str) or not _HEADER_NAME.fullmatch(name):
            raise Permanent(f"{where}: is not the name of a header")
        if name.lower() in _RESERVED_HEADERS or name.lower().startswith(_RESERVED_PREFIXES):
            raise Permanent(f"{where}: is reserved for pgoutbox and the brokers")
        checked[name] = check_name(where, value, max_bytes=MAX_HEADER_BYTES)
    return checked


def _content_type(event: CloudEvent, data: object) -> str:
    default = "application/octet-stream" if isinstance(data, bytes) else "application/json"
    content_type = _text("event.content_type", default if event.content_type is None else event.content_type)
    if not _MEDIA_TYPE.fullmatch(content_type):
        raise Permanent("event.content_type: is not a media type")
    return content_type


def _body(data: JsonValue | bytes, content_type: str) -> bytes:
    if isinstance(data, bytes):
        return data
    if isinstance(data, str) and not _JSON_TYPE.fullmatch(content_type):
        return encode_text("event.data", data)
    return encode_json("event.data", data)
