"""Tests which payloads are accepted, their JSON, and the path in each refusal."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import json
import math
import sys
import uuid
from collections import OrderedDict, namedtuple
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Annotated, NewType, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import (
    BaseModel,
    JsonValue,
    Secret,
    SecretBytes,
    SecretStr,
    field_validator,
)
from typing_extensions import TypedDict

from pgoutbox.enqueue.payloads import MAX_DEPTH, Serializer, to_json
from pgoutbox.errors import ArgumentError, ConfigurationError
from pgoutbox.topics import Topic
from tests.support.drafts import LIMIT, Account, Address, draft_of, refusal

NOW = datetime.now(UTC)


def field_of(payload: object, serializer: Serializer | None = None) -> str:
    """Return the path that the payload's refusal names."""
    with pytest.raises(ArgumentError) as caught:
        to_json(payload, max_bytes=LIMIT, serializer=serializer)
    assert caught.value.field.isprintable()
    return caught.value.field


def nested(depth: int, kind: type[list[object]] | type[dict[str, object]] = list) -> object:
    value: object = 1
    for _ in range(depth):
        value = [value] if kind is list else {"a": value}
    return value


# --- JSON -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("payload", [None, True, 0, -1.5, "text", "", [], {}, [1, [2]], {"a": {"b": None}}, 10**30])
def test_any_json_value_is_a_payload(payload: object) -> None:
    assert json.loads(to_json(payload, max_bytes=LIMIT)) == payload


@pytest.mark.parametrize("text", ["\\u0000", "NaN", "-Infinity", "é", "\u2028\x7f\u0085", "\U0001f600", "\\"])
def test_suspicious_but_valid_text_is_accepted_unchanged(text: str) -> None:
    assert json.loads(to_json({text: [text]}, max_bytes=LIMIT)) == {text: [text]}


def test_the_longest_integer_that_python_parses_is_accepted() -> None:
    payload = {"n": -(10**4300) + 1, "text": "9" * 5000}
    assert json.loads(to_json(payload, max_bytes=LIMIT)) == payload


def test_the_json_text_has_no_line_feed() -> None:
    assert "\n" not in to_json({"a\nb": "c\r\nd\u2028"}, max_bytes=LIMIT)


@pytest.mark.parametrize(
    ("payload", "path"),
    [
        ("\0", "payload"),
        ({"a": {"b": "x\0"}}, "payload.a.b"),
        ({"a\0b": 1}, 'payload["a\\u0000b"]'),
        ({"a": ["x", "\ud800"]}, "payload.a[1]"),
        ({"\udfff": 1}, 'payload["\\udfff"]'),
        ({"a": math.nan}, "payload.a"),
        ([math.inf], "payload[0]"),
        ({"a b": -math.inf}, 'payload["a b"]'),
        ({"when": NOW}, "payload.when"),
        ([{"price": Decimal(1)}], "payload[0].price"),
        (uuid.uuid4(), "payload"),
        ({"raw": b"x"}, "payload.raw"),
        ({"all": {1, 2}}, "payload.all"),
        ({"f": len}, "payload.f"),
        ({"n": -(10**4300)}, "payload.n"),
        ({1: "a"}, "payload[1]"),
        ({"a": {True: 1}}, "payload.a[True]"),
        ({None: 1}, "payload[None]"),
        ({(1, 2): 1}, "payload[(1, 2)]"),
    ],
)
def test_a_value_that_json_or_jsonb_cannot_hold_is_refused_with_its_path(payload: object, path: str) -> None:
    assert field_of(payload) == path


def test_keys_that_json_would_merge_are_refused() -> None:
    assert field_of({"1": "a", 1: "b"}) == "payload[1]"
    assert field_of({1.0: "a"}) == "payload[1.0]"


class Flawed(str):
    """Keys that are different in Python and the same in JSON."""

    __slots__ = ()

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other


def test_duplicate_keys_of_one_text_are_refused() -> None:
    assert field_of({Flawed("a"): 1, Flawed("a"): 2}) == "payload.a"


def test_the_refusal_of_another_type_names_the_accepted_ones() -> None:
    with pytest.raises(ArgumentError, match=r"^payload\.when: not JSON: date; pass serializer=$"):
        to_json({"when": date(2026, 1, 1)}, max_bytes=LIMIT)


@pytest.mark.parametrize("kind", [list, dict])
def test_nesting_is_accepted_to_the_limit_and_refused_beyond_it(kind: type[list[object]]) -> None:
    assert json.loads(to_json(nested(MAX_DEPTH, kind), max_bytes=LIMIT)) == nested(MAX_DEPTH, kind)
    with pytest.raises(ArgumentError, match="deeper than 100 levels"):
        to_json(nested(MAX_DEPTH + 1, kind), max_bytes=LIMIT)


def test_a_payload_nested_20000_deep_is_refused_like_any_other_that_is_too_deep() -> None:
    with pytest.raises(ArgumentError, match="deeper than 100 levels"):
        to_json(nested(20_000), max_bytes=LIMIT)


@pytest.mark.slow
def test_a_payload_that_needs_more_than_the_remaining_stack_is_refused() -> None:
    payload = {"a": nested(MAX_DEPTH - 1, dict), "bad": Decimal(1)}
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack()) + 60)
    try:
        with pytest.raises(ArgumentError, match="too deep for the stack"):
            to_json(payload, max_bytes=LIMIT)
    finally:
        sys.setrecursionlimit(limit)


def test_a_payload_that_contains_itself_is_refused() -> None:
    cycle: list[object] = [1]
    cycle += [{"again": cycle}, cycle]
    assert field_of(cycle) == "payload[1].again"


def test_a_repeated_part_is_not_a_cycle() -> None:
    part = [1]
    assert json.loads(to_json([part, part], max_bytes=LIMIT)) == [[1], [1]]


def test_the_size_is_counted_in_bytes_of_json() -> None:
    assert to_json("é" * 49, max_bytes=100)
    with pytest.raises(ArgumentError, match=r"payload: has 102 bytes as JSON, the limit is 100 \(PGOUTBOX_MAX_PAYLOAD"):
        to_json("é" * 50, max_bytes=100)


def test_a_tuple_is_written_as_a_list() -> None:
    point = namedtuple("point", "x y")
    assert to_json({"a": (1, (2,)), "p": point(3, 4)}, max_bytes=LIMIT) == '{"a":[1,[2]],"p":[3,4]}'


def test_subclasses_are_written_as_the_plain_value_that_they_are() -> None:
    colour = enum.StrEnum("colour", ["RED"])
    size = enum.IntEnum("size", ["S"])
    payload = OrderedDict([(colour.RED, size.S), ("f", type("F", (float,), {})(0.5))])
    assert to_json(payload, max_bytes=LIMIT) == '{"red":1,"f":0.5}'


def test_the_serializer_is_called_only_for_values_that_are_not_json() -> None:
    seen: list[object] = []

    def serialize(value: object) -> JsonValue:
        seen.append(value)
        return {"day": str(value)} if isinstance(value, date) else [1, 2]

    text = to_json({"a": "x", "when": date(2026, 1, 2), "s": {2, 1}}, max_bytes=LIMIT, serializer=serialize)
    assert text == '{"a":"x","when":{"day":"2026-01-02"},"s":[1,2]}'
    assert seen == [date(2026, 1, 2), {1, 2}]


def test_the_result_of_the_serializer_is_validated() -> None:
    assert field_of({"a": NOW}, serializer=lambda _: "\0") == "payload.a"
    assert field_of({"a": NOW}, serializer=lambda value: cast("JsonValue", value)) == "payload.a"
    assert field_of({"a": {1}}, serializer=lambda _: {"b": [math.nan]}) == "payload.a.b[0]"


def test_an_endless_serializer_is_stopped() -> None:
    assert field_of({"a": NOW}, serializer=lambda _: cast("JsonValue", [datetime.now(UTC)])).startswith("payload.a[0]")


def test_an_error_of_the_serializer_passes_through() -> None:
    def serialize(value: object) -> JsonValue:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        to_json(NOW, max_bytes=LIMIT, serializer=serialize)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters()) | st.integers(), inner),
    max_leaves=20,
)


@pytest.mark.slow
@given(JSON)
def test_an_accepted_payload_is_read_back_unchanged(payload: object) -> None:
    try:
        text = to_json(payload, max_bytes=LIMIT)
    except ArgumentError:
        assert field_of(payload).startswith("payload")
    else:
        assert json.loads(text) == payload
        assert "\\u0000" not in text.replace("\\\\", "")
        assert text.encode().decode() == text


# --- models -----------------------------------------------------------------------------------------------------------


class Measured(BaseModel):
    value: float


def test_a_model_is_dumped_so_that_it_validates_again() -> None:
    account = Account(userId=7, addresses=[Address(street="x", since=date(2026, 1, 2))])
    text = to_json(account, max_bytes=LIMIT)
    assert text == '{"userId":7,"email":"","addresses":[{"street":"x","since":"2026-01-02"}],"extra":null}'
    assert Account.model_validate_json(text) == account


def test_a_model_inside_a_payload_is_dumped_too() -> None:
    assert to_json({"at": Address(street="x")}, max_bytes=LIMIT) == '{"at":{"street":"x","since":null}}'


def test_a_model_with_a_value_that_json_cannot_hold_is_refused_with_the_path() -> None:
    assert field_of(Account(userId=1, email="a\0")) == "payload.email"
    assert field_of(Account(userId=1, extra=[math.nan])) == "payload.extra[0]"
    assert field_of(Measured(value=math.inf)) == "payload.value"
    assert field_of(Account(userId=1, extra={"x": object()})) == "payload"


def test_a_model_whose_fields_have_another_type_than_declared_is_refused() -> None:
    assert field_of(Account.model_construct(user_id="canary")) == "payload"


def test_a_mapping_is_validated_into_the_topics_model() -> None:
    topic = Topic("account.opened", payload=Account, destination=lambda a: f"mailto:{a.email}")
    draft = draft_of(topic, {"userId": "7", "email": "a@example.org"})
    assert json.loads(draft.payload)["userId"] == 7
    assert draft.options["destination"] == "mailto:a@example.org"


def test_a_mapping_that_does_not_match_the_model_is_refused_without_its_value() -> None:
    topic = Topic("account.opened", payload=Account)
    text = refusal(topic, {"userId": 1, "addresses": [{"street": "x"}, {"street": {"canary": 1}}]})
    assert text == "payload.addresses[1].street: does not fit Account: Input should be a valid string"


def test_an_instance_of_another_model_is_refused() -> None:
    assert refusal(Topic("a", payload=Account), Address(street="x")) == "payload: must be a Account, not a Address"


class Holder(TypedDict):
    token: SecretStr


Hidden = NewType("Hidden", SecretStr)


@dataclasses.dataclass
class Plain:
    inner: dict[str, list[Secret[int]]]


class DirectSecret(BaseModel):
    password: SecretStr


class NestedSecret(BaseModel):
    accounts: list[DirectSecret | None]


class KeyedSecret(BaseModel):
    held: dict[str, Holder]


class PlainSecret(BaseModel):
    plain: Annotated[Plain, "x"]


class NewTypeSecret(BaseModel):
    hidden: Hidden | None = None


class BytesSecret(BaseModel):
    key: tuple[SecretBytes, ...] = ()


class RecursiveSecret(BaseModel):
    children: list[RecursiveSecret] = []
    token: SecretStr = SecretStr("")


SECRET_MODELS = [
    (DirectSecret, "payload.password"),
    (NestedSecret, "payload.accounts.password"),
    (KeyedSecret, "payload.held.token"),
    (PlainSecret, "payload.plain.inner"),
    (NewTypeSecret, "payload.hidden"),
    (BytesSecret, "payload.key"),
    (RecursiveSecret, "payload.token"),
]


@pytest.mark.parametrize(("model", "path"), SECRET_MODELS)
def test_a_topic_whose_model_has_a_secret_field_is_refused(model: type[BaseModel], path: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^topic 'a': {path}: holds a secret: do not store secrets"):
        Topic("a", payload=model)


@pytest.mark.parametrize(("model", "path"), SECRET_MODELS)
def test_a_model_with_a_secret_field_is_refused_as_a_payload(model: type[BaseModel], path: str) -> None:
    assert field_of([model.model_construct()]) == path.replace("payload", "payload[0]")


def test_a_secret_behind_a_field_of_any_type_is_refused() -> None:
    assert field_of(Account(userId=1, extra={"deep": [SecretStr("canary")]})) == "payload.extra.deep[0]"
    assert to_json(Account(userId=1, extra="**********"), max_bytes=LIMIT)


def test_a_secret_is_not_offered_to_the_serializer() -> None:
    assert field_of({"a": SecretStr("canary")}, serializer=str) == "payload.a"


def test_a_recursive_model_without_secrets_is_accepted() -> None:
    class Tree(BaseModel):
        children: list[Tree] = []

    assert to_json(Tree(children=[Tree()]), max_bytes=LIMIT) == '{"children":[{"children":[]}]}'


class Versioned(BaseModel):
    name: str

    @field_validator("name")
    @classmethod
    def _lower(cls, name: str) -> str:
        if not name.islower():
            raise ValueError("must be lower case")
        return name


def test_the_message_of_a_model_validator_reaches_the_caller() -> None:
    text = refusal(Topic("a", payload=Versioned), {"name": "X"})
    assert text == "payload.name: does not fit Versioned: Value error, must be lower case"
