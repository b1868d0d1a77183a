"""From a payload to the JSON text that PostgreSQL stores and gives back unchanged, or to the path of what is wrong.

Secrets are refused, both as values and as types of a model's fields.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Final, cast

from pydantic import BaseModel, JsonValue, ValidationError
from pydantic_core import to_json as encode_json

from pgoutbox.encryption import SEALED
from pgoutbox.errors import PayloadError
from pgoutbox.message import P
from pgoutbox.options import NO_SECRETS, SECRETS, secret_in_model
from pgoutbox.text import check_storable, member

MAX_DEPTH: Final = 100

Serializer = Callable[[object], JsonValue]


_JSON_SCALARS = frozenset({str, int, float, bool, type(None)})
# What the encoder makes of NUL, which jsonb cannot hold, and of floats that JSON cannot; they may be text as well.
_SUSPICIOUS = re.compile(rb"\\u0000|NaN|Infinity")
# Python refuses to read longer integers, and a worker that cannot read a message cannot even fail it.
_MAX_DIGITS = 4_300
_INTEGER_BOUND = 10**_MAX_DIGITS
_TOO_MANY_DIGITS = re.compile(rb"(?<![0-9])[0-9]{%d}" % (_MAX_DIGITS + 1))
_MASK = "**********"


def to_json(value: object, *, max_bytes: int, serializer: Serializer | None = None, field: str = "payload") -> str:
    """The value as JSON text that PostgreSQL stores and gives back unchanged.

    pydantic's encoder does the work in one go, and refuses cycles. It also writes much that is not JSON, so the value
    is walked afterwards, no further than its text is long. Only where something is wrong, or needs the serializer, does
    the slow way find the path. The name under which pgoutbox stores encrypted payloads is refused, too.
    """
    text = None
    try:
        data = encode_json(value)
        if len(data) <= max_bytes and _is_plain(value, MAX_DEPTH) and not _is_suspicious(data):
            text = data.decode()
    except (ValueError, RecursionError):
        pass
    if text is None:
        text = _encode_faithfully(value, field, max_bytes, serializer)
    # In the encoder's text the name can only stand as it is; the slow way tells whether it is a member at the top.
    if text.startswith("{") and SEALED in text and SEALED in json.loads(text):
        raise PayloadError(member(field, SEALED), "is the name under which pgoutbox stores encrypted payloads")
    return text


def _encode_faithfully(value: object, field: str, max_bytes: int, serializer: Serializer | None) -> str:
    try:
        data = encode_json(_faithful(value, field, (), serializer))
    except RecursionError:
        raise PayloadError(field, "is nested too deep for the stack") from None
    if len(data) > max_bytes:
        raise PayloadError(
            field, f"has {len(data)} bytes as JSON, the limit is {max_bytes} (PGOUTBOX_MAX_PAYLOAD_BYTES)"
        )
    return data.decode()


def _is_suspicious(data: bytes) -> bool:
    return _SUSPICIOUS.search(data) is not None or (
        len(data) > _MAX_DIGITS and _TOO_MANY_DIGITS.search(data) is not None
    )


def _is_plain(value: object, depth_left: int) -> bool:
    """Whether the value is made of exactly the types that JSON has, and not nested too deep."""
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
        if type(item) not in _JSON_SCALARS and not _is_plain(item, depth_left - 1):
            return False
    return True


def _faithful(value: object, path: str, parents: tuple[int, ...], serializer: Serializer | None) -> JsonValue:
    """The value with models dumped and the serializer applied; a `PayloadError` with the path for what cannot be."""
    if isinstance(value, BaseModel):
        value = _dump(value, path)
    if value is None or isinstance(value, (str, bool, int, float)):
        return _scalar(value, path)
    if isinstance(value, (dict, list, tuple)):
        if id(value) in parents:
            raise PayloadError(path, "contains itself")
        if len(parents) == MAX_DEPTH:
            raise PayloadError(path, f"is nested deeper than {MAX_DEPTH} levels")
        parents = (*parents, id(value))
        if isinstance(value, dict):
            return {
                key: _faithful(item, member(path, key), parents, serializer)
                for key, item in _text_keys(value, path).items()
            }
        return [_faithful(item, f"{path}[{index}]", parents, serializer) for index, item in enumerate(value)]
    if isinstance(value, SECRETS):
        raise PayloadError(path, NO_SECRETS)
    if serializer is None:
        raise PayloadError(path, f"not JSON: {type(value).__name__}; pass serializer=")
    made = serializer(value)
    if made is not None and not isinstance(made, (str, bool, int, float, dict, list, tuple)):
        raise PayloadError(path, f"not JSON: the serializer made a {type(made).__name__} of a {type(value).__name__}")
    return _faithful(made, path, (*parents, id(value)), serializer)


def _scalar(value: str | float | None, path: str) -> JsonValue:
    # A subclass, a member of an enumeration say, is written as the plain value that it is.
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        check_storable(path, value)
        return str.__str__(value)
    if isinstance(value, int):
        if abs(int.__pos__(value)) >= _INTEGER_BOUND:
            raise PayloadError(path, f"an integer must not have more than {_MAX_DIGITS} digits")
        return int.__pos__(value)
    if not math.isfinite(value):
        raise PayloadError(path, f"not JSON: {float.__repr__(value)}")
    return float.__pos__(value)


def _text_keys(value: dict[object, object], path: str) -> dict[str, object]:
    # JSON knows text keys only. An encoder would turn 1 and True into text, where they can meet another key, and the
    # handler would not find them under what the caller wrote.
    members: dict[str, object] = {}
    for key, item in value.items():
        if not isinstance(key, str):
            raise PayloadError(member(path, key), f"a key must be text, not {type(key).__name__}")
        check_storable(member(path, key), key)
        text = str.__str__(key)
        if text in members:
            raise PayloadError(member(path, key), "two keys have the same text")
        members[text] = item
    return members


def fit(topics_model: type[P], payload: object) -> P:
    """The payload as an instance of its topic's model, which validates a mapping."""
    model = cast("type[BaseModel]", topics_model)
    if not isinstance(payload, model):
        if isinstance(payload, BaseModel):
            raise PayloadError("payload", f"must be a {model.__name__}, not a {type(payload).__name__}")
        try:
            payload = model.model_validate(payload)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            path = "payload"
            for place in first["loc"]:
                path = member(path, place)
            raise PayloadError(path, f"does not fit {model.__name__}: {first['msg']}") from None
    return cast("P", payload)


def _dump(model: BaseModel, path: str) -> JsonValue:
    """What validates to the same model again: by alias and without computed fields."""
    secret = secret_in_model(type(model))
    if secret is not None:
        raise PayloadError(f"{path}{secret}", NO_SECRETS)
    try:
        dumped = model.model_dump(mode="json", by_alias=True, round_trip=True, warnings="error")
    except (ValueError, RecursionError) as error:
        raise PayloadError(
            path, f"the {type(model).__name__} cannot be written as JSON: {type(error).__name__}"
        ) from error
    # In a field that is typed `Any` pydantic masks a secret, and makes null of a float that JSON does not have.
    if any(leaf is None or leaf == _MASK for _, leaf in _leaves(dumped, path)):
        for place, leaf in _leaves(model, path):
            if isinstance(leaf, SECRETS):
                raise PayloadError(place, NO_SECRETS)
            if isinstance(leaf, float):
                _scalar(leaf, place)
    return dumped


def _leaves(value: object, path: str) -> Iterator[tuple[str, object]]:
    """Whatever is not a container, with its path."""
    if isinstance(value, (BaseModel, dict)):
        for key, item in dict(value).items():
            yield from _leaves(item, member(path, key))
    elif isinstance(value, (list, tuple, set, frozenset)):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{path}[{index}]")
    else:
        yield path, value
