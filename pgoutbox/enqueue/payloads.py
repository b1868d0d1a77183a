"""Conversion of payloads to JSON text that PostgreSQL stores and returns unchanged, with the path of each mistake.

Secrets are refused, both as values and as types of a model's fields.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Final, NoReturn, cast

from pydantic import BaseModel, JsonValue, ValidationError
from pydantic_core import to_json as encode_json

from pgoutbox.encryption import SEALED
from pgoutbox.errors import ArgumentError
from pgoutbox.message import P
from pgoutbox.options import NO_SECRETS, SECRETS, secret_in_model
from pgoutbox.text import check_storable, member

MAX_DEPTH: Final = 100

Serializer = Callable[[object], JsonValue]


_JSON_SCALARS = frozenset({str, int, float, bool, type(None)})
# The encoder's output for NUL, which jsonb cannot store, and for non-finite floats. Texts may contain them too.
_SUSPICIOUS = re.compile(rb"\\u0000|NaN|Infinity")
# Python refuses to read longer integers, so a worker could not even fail such a message.
_MAX_DIGITS = 4_300
_INTEGER_BOUND = 10**_MAX_DIGITS
_TOO_MANY_DIGITS = re.compile(rb"(?<![0-9])[0-9]{%d}" % (_MAX_DIGITS + 1))
_MASK = "**********"


def to_json(value: object, *, max_bytes: int, serializer: Serializer | None = None, field: str = "payload") -> str:
    """Return the value as JSON text that PostgreSQL stores and returns unchanged.

    pydantic's encoder writes the text in one pass, and refuses cycles. It also accepts values that are not JSON, so the
    value is checked afterwards. The slow path, which finds the path of a mistake, only runs if there is one, or if a
    value needs the serializer. The reserved name of encrypted payloads is refused, too.
    """
    text = None
    try:
        data = encode_json(value)
        if (
            len(data) <= max_bytes
            and is_plain(value, MAX_DEPTH)
            and _SUSPICIOUS.search(data) is None
            and (len(data) <= _MAX_DIGITS or _TOO_MANY_DIGITS.search(data) is None)
        ):
            text = data.decode()
    except (ValueError, RecursionError):
        pass
    if text is None:
        text = _encode_faithfully(value, field, max_bytes, serializer)
    # The encoder writes the name unescaped. The slow path finds out whether it is a member at the top.
    if text.startswith("{") and SEALED in text and SEALED in json.loads(text):
        raise ArgumentError(member(field, SEALED), "is reserved: pgoutbox stores encrypted payloads under this name")
    return text


def _encode_faithfully(value: object, field: str, max_bytes: int, serializer: Serializer | None) -> str:
    try:
        data = encode_json(_faithful(value, field, (), serializer))
    except RecursionError:
        raise ArgumentError(field, "is nested too deep for the stack") from None
    if len(data) > max_bytes:
        raise ArgumentError(
            field, f"has {len(data)} bytes as JSON, the limit is {max_bytes} (PGOUTBOX_MAX_PAYLOAD_BYTES)"
        )
    return data.decode()


def is_plain(value: object, depth_left: int) -> bool:
    """Whether the value consists of exactly the types of JSON, and is not nested too deep."""
    kind = type(value)
    if kind in _JSON_SCALARS:
        return True
    if depth_left == 0:
        return False
    if kind is list:
        items = cast("Iterable[object]", value)
    elif kind is dict:
        members = cast("dict[object, object]", value)
        for key in members:
            if type(key) is not str:
                return False
        items = members.values()
    else:
        return False
    for item in items:  # noqa: SIM110 - on the hot path, where a generator doubles the price
        if type(item) not in _JSON_SCALARS and not is_plain(item, depth_left - 1):
            return False
    return True


def _faithful(value: object, path: str, parents: tuple[int, ...], serializer: Serializer | None) -> JsonValue:
    """Return the value with models dumped and the serializer applied, or raise `ArgumentError` with a path."""
    if isinstance(value, BaseModel):
        value = _dump(value, path)
    if value is None or isinstance(value, (str, bool, int, float)):
        return _scalar(value, path)
    if isinstance(value, (dict, list, tuple)):
        if id(value) in parents:
            raise ArgumentError(path, "contains itself")
        if len(parents) == MAX_DEPTH:
            raise ArgumentError(path, f"is nested deeper than {MAX_DEPTH} levels")
        parents = (*parents, id(value))
        if isinstance(value, dict):
            return {
                key: _faithful(item, member(path, key), parents, serializer)
                for key, item in _text_keys(value, path).items()
            }
        return [_faithful(item, f"{path}[{index}]", parents, serializer) for index, item in enumerate(value)]
    if isinstance(value, SECRETS):
        raise ArgumentError(path, NO_SECRETS)
    if serializer is None:
        raise ArgumentError(path, f"not JSON: {type(value).__name__}; pass serializer=")
    made = serializer(value)
    if made is not None and not isinstance(made, (str, bool, int, float, dict, list, tuple)):
        raise ArgumentError(path, f"not JSON: the serializer made a {type(made).__name__} of a {type(value).__name__}")
    return _faithful(made, path, (*parents, id(value)), serializer)


def _scalar(value: str | float | None, path: str) -> JsonValue:
    # A subclass, for example a member of an enumeration, is written as its plain value.
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        check_storable(path, value)
        return str.__str__(value)
    if isinstance(value, int):
        if abs(int.__pos__(value)) >= _INTEGER_BOUND:
            raise ArgumentError(path, f"an integer must not have more than {_MAX_DIGITS} digits")
        return int.__pos__(value)
    if not math.isfinite(value):
        raise ArgumentError(path, f"not JSON: {float.__repr__(value)}")
    return float.__pos__(value)


def _text_keys(value: dict[object, object], path: str) -> dict[str, object]:
    # JSON has only text keys. An encoder would turn 1 and True into text, which may equal another key. And the handler
    # would not find them under the original key.
    members: dict[str, object] = {}
    for key, item in value.items():
        if not isinstance(key, str):
            raise ArgumentError(member(path, key), f"a key must be text, not {type(key).__name__}")
        check_storable(member(path, key), key)
        text = str.__str__(key)
        if text in members:
            raise ArgumentError(member(path, key), "two keys have the same text")
        members[text] = item
    return members


def from_json(data: bytes, field: str) -> JsonValue:
    """Return the payload that a person gave as JSON. An error names the field and the place of the mistake."""
    if data.startswith(b"\xef\xbb\xbf"):
        raise ArgumentError(field, "starts with a byte order mark; save it as UTF-8 without one")
    try:
        value: JsonValue = json.loads(data.decode(), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise ArgumentError(field, f"not UTF-8 at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise ArgumentError(
            field, f"not JSON at line {error.lineno}, column {error.colno}: {error.msg[:1].lower()}{error.msg[1:]}"
        ) from None
    except RecursionError:
        raise ArgumentError(field, "nested too deeply") from None
    except ValueError as error:
        raise ArgumentError(field, f"not JSON: {error}") from None
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def fit(topics_model: type[P], payload: object) -> P:
    """Return the payload as an instance of its topic's model, which validates a mapping."""
    model = cast("type[BaseModel]", topics_model)
    if not isinstance(payload, model):
        if isinstance(payload, BaseModel):
            raise ArgumentError("payload", f"must be a {model.__name__}, not a {type(payload).__name__}")
        try:
            payload = model.model_validate(payload)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            path = "payload"
            for place in first["loc"]:
                path = member(path, place)
            raise ArgumentError(path, f"does not fit {model.__name__}: {first['msg']}") from None
    return cast("P", payload)


def _dump(model: BaseModel, path: str) -> JsonValue:
    """Return a dump that validates to the same model again: by alias and without computed fields."""
    secret = secret_in_model(type(model))
    if secret is not None:
        raise ArgumentError(f"{path}{secret}", NO_SECRETS)
    try:
        dumped = model.model_dump(mode="json", by_alias=True, round_trip=True, warnings="error")
    except (ValueError, RecursionError) as error:
        raise ArgumentError(
            path, f"the {type(model).__name__} cannot be written as JSON: {type(error).__name__}"
        ) from error
    # In a field of type `Any`, pydantic masks a secret, and writes a non-finite float as null.
    if any(leaf is None or leaf == _MASK for _, leaf in _leaves(dumped, path)):
        for place, leaf in _leaves(model, path):
            if isinstance(leaf, SECRETS):
                raise ArgumentError(place, NO_SECRETS)
            if isinstance(leaf, float):
                _scalar(leaf, place)
    return dumped


def _leaves(value: object, path: str) -> Iterator[tuple[str, object]]:
    """Yield all values that are not containers, with their paths."""
    if isinstance(value, (BaseModel, dict)):
        for key, item in dict(value).items():
            yield from _leaves(item, member(path, key))
    elif isinstance(value, (list, tuple, set, frozenset)):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{path}[{index}]")
    else:
        yield path, value
