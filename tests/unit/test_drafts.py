"""What may be enqueued, and the path that every refusal names."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import json
import math
import sys
import uuid
from collections import OrderedDict, namedtuple
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Annotated, Any, NewType, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    Secret,
    SecretBytes,
    SecretStr,
    computed_field,
    field_validator,
)
from typing_extensions import TypedDict

from pgoutbox.drafts import (
    CHUNK_ROWS,
    MAX_DEPTH,
    Draft,
    NewMessage,
    Serializer,
    Topic,
    check_key,
    check_name,
    check_whole,
    chunks,
    columns,
    prepare,
    to_json,
)
from pgoutbox.errors import ConfigurationError, PayloadError
from pgoutbox.retry import RetryPolicy

LIMIT = 1_000_000
DEFAULT = 7
HUGE = pytest.param(10**5000, id="5001 digits")  # More than Python will write.
NOW = datetime.now(UTC)


def draft_of(topic: str | Topic[Any] = "mail", payload: object = None, /, **options: object) -> Draft:
    known: dict[str, Any] = options
    return prepare(
        NewMessage(topic, payload, **known),
        topic if isinstance(topic, Topic) else Topic(topic),
        max_attempts=DEFAULT,
        max_payload_bytes=LIMIT,
        serializer=None,
    )


def refusal(topic: str | Topic[Any] = "mail", payload: object = None, /, **options: object) -> str:
    """What the refusal of the message says."""
    with pytest.raises(PayloadError) as caught:
        draft_of(topic, payload, **options)
    assert str(caught.value).isprintable()
    return str(caught.value)


def field_of(payload: object, serializer: Serializer | None = None) -> str:
    """The path that the refusal of the payload names."""
    with pytest.raises(PayloadError) as caught:
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
def test_text_that_only_looks_suspicious_is_accepted_as_it_is(text: str) -> None:
    assert json.loads(to_json({text: [text]}, max_bytes=LIMIT)) == {text: [text]}


def test_the_longest_integer_that_python_reads_is_accepted() -> None:
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
def test_what_json_or_jsonb_cannot_hold_is_refused_with_its_path(payload: object, path: str) -> None:
    assert field_of(payload) == path


def test_keys_that_would_be_coerced_to_one_text_are_refused_rather_than_merged() -> None:
    assert field_of({"1": "a", 1: "b"}) == "payload[1]"
    assert field_of({1.0: "a"}) == "payload[1.0]"


class Flawed(str):
    """Keys that are different to Python and the same to JSON."""

    __slots__ = ()

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other


def test_two_keys_of_the_same_text_are_refused() -> None:
    assert field_of({Flawed("a"): 1, Flawed("a"): 2}) == "payload.a"


def test_the_refusal_of_another_type_says_what_to_pass() -> None:
    with pytest.raises(PayloadError, match=r"^payload\.when: not JSON: date; pass serializer=$"):
        to_json({"when": date(2026, 1, 1)}, max_bytes=LIMIT)


@pytest.mark.parametrize("kind", [list, dict])
def test_nesting_is_accepted_to_the_limit_and_refused_beyond_it(kind: type[list[object]]) -> None:
    assert json.loads(to_json(nested(MAX_DEPTH, kind), max_bytes=LIMIT)) == nested(MAX_DEPTH, kind)
    with pytest.raises(PayloadError, match="deeper than 100 levels"):
        to_json(nested(MAX_DEPTH + 1, kind), max_bytes=LIMIT)


def test_a_payload_nested_20000_deep_is_refused_like_any_other_that_is_too_deep() -> None:
    with pytest.raises(PayloadError, match="deeper than 100 levels"):
        to_json(nested(20_000), max_bytes=LIMIT)


def test_a_payload_that_needs_more_stack_than_there_is_left_is_refused() -> None:
    payload = {"a": nested(MAX_DEPTH - 1, dict), "bad": Decimal(1)}
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack()) + 60)
    try:
        with pytest.raises(PayloadError, match="too deep for the stack"):
            to_json(payload, max_bytes=LIMIT)
    finally:
        sys.setrecursionlimit(limit)


def test_a_payload_that_contains_itself_is_refused() -> None:
    cycle: list[object] = [1]
    cycle += [{"again": cycle}, cycle]
    assert field_of(cycle) == "payload[1].again"


def test_the_same_part_twice_is_not_a_cycle() -> None:
    part = [1]
    assert json.loads(to_json([part, part], max_bytes=LIMIT)) == [[1], [1]]


def test_the_size_is_counted_in_bytes_of_json() -> None:
    assert to_json("é" * 49, max_bytes=100)
    with pytest.raises(PayloadError, match=r"payload: has 102 bytes as JSON, the limit is 100 \(PGOUTBOX_MAX_PAYLOAD"):
        to_json("é" * 50, max_bytes=100)


def test_a_tuple_is_written_as_a_list() -> None:
    point = namedtuple("point", "x y")
    assert to_json({"a": (1, (2,)), "p": point(3, 4)}, max_bytes=LIMIT) == '{"a":[1,[2]],"p":[3,4]}'


def test_subclasses_are_written_as_the_plain_value_that_they_are() -> None:
    colour = enum.StrEnum("colour", ["RED"])
    size = enum.IntEnum("size", ["S"])
    payload = OrderedDict([(colour.RED, size.S), ("f", type("F", (float,), {})(0.5))])
    assert to_json(payload, max_bytes=LIMIT) == '{"red":1,"f":0.5}'


def test_the_serializer_is_called_for_what_is_not_json_only() -> None:
    seen: list[object] = []

    def serialize(value: object) -> JsonValue:
        seen.append(value)
        return {"day": str(value)} if isinstance(value, date) else [1, 2]

    text = to_json({"a": "x", "when": date(2026, 1, 2), "s": {2, 1}}, max_bytes=LIMIT, serializer=serialize)
    assert text == '{"a":"x","when":{"day":"2026-01-02"},"s":[1,2]}'
    assert seen == [date(2026, 1, 2), {1, 2}]


def test_what_the_serializer_makes_is_checked_like_the_rest() -> None:
    assert field_of({"a": NOW}, serializer=lambda _: "\0") == "payload.a"
    assert field_of({"a": NOW}, serializer=lambda value: cast("JsonValue", value)) == "payload.a"
    assert field_of({"a": {1}}, serializer=lambda _: {"b": [math.nan]}) == "payload.a.b[0]"


def test_a_serializer_that_goes_on_for_ever_is_stopped() -> None:
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


@given(JSON)
def test_whatever_is_accepted_reads_back_as_it_was(payload: object) -> None:
    try:
        text = to_json(payload, max_bytes=LIMIT)
    except PayloadError:
        assert field_of(payload).startswith("payload")
    else:
        assert json.loads(text) == payload
        assert "\\u0000" not in text.replace("\\\\", "")
        assert text.encode().decode() == text


# --- models -----------------------------------------------------------------------------------------------------------


class Address(BaseModel):
    street: str
    since: date | None = None


class Account(BaseModel):
    model_config = ConfigDict(populate_by_name=True)

    user_id: int = Field(alias="userId")
    email: str = ""
    addresses: list[Address] = []
    extra: Any = None

    @computed_field  # type: ignore[prop-decorator]
    @property
    def label(self) -> str:
        return f"{self.user_id}"


class Measured(BaseModel):
    value: float


def test_a_model_is_dumped_so_that_it_validates_again() -> None:
    account = Account(userId=7, addresses=[Address(street="x", since=date(2026, 1, 2))])
    text = to_json(account, max_bytes=LIMIT)
    assert text == '{"userId":7,"email":"","addresses":[{"street":"x","since":"2026-01-02"}],"extra":null}'
    assert Account.model_validate_json(text) == account


def test_a_model_inside_a_payload_is_dumped_too() -> None:
    assert to_json({"at": Address(street="x")}, max_bytes=LIMIT) == '{"at":{"street":"x","since":null}}'


def test_a_model_that_holds_what_json_cannot_is_refused_with_the_path() -> None:
    assert field_of(Account(userId=1, email="a\0")) == "payload.email"
    assert field_of(Account(userId=1, extra=[math.nan])) == "payload.extra[0]"
    assert field_of(Measured(value=math.inf)) == "payload.value"
    assert field_of(Account(userId=1, extra={"x": object()})) == "payload"


def test_a_model_whose_fields_hold_another_type_than_declared_is_refused() -> None:
    assert field_of(Account.model_construct(user_id="canary")) == "payload"


def test_a_mapping_is_validated_into_the_topics_model() -> None:
    topic = Topic("account.opened", payload=Account, destination=lambda a: f"mailto:{a.email}")
    draft = draft_of(topic, {"userId": "7", "email": "a@example.org"})
    assert json.loads(draft.payload)["userId"] == 7
    assert draft.destination == "mailto:a@example.org"


def test_a_mapping_that_does_not_fit_the_model_is_refused_with_the_path_and_without_the_value() -> None:
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
    with pytest.raises(
        ConfigurationError, match=f"^topic 'a': {path}: holds a secret: secrets are minted at send time"
    ):
        Topic("a", payload=model)


@pytest.mark.parametrize(("model", "path"), SECRET_MODELS)
def test_a_model_with_a_secret_field_is_refused_as_a_payload(model: type[BaseModel], path: str) -> None:
    assert field_of([model.model_construct()]) == path.replace("payload", "payload[0]")


def test_a_secret_behind_a_field_of_any_type_is_refused() -> None:
    assert field_of(Account(userId=1, extra={"deep": [SecretStr("canary")]})) == "payload.extra.deep[0]"
    assert to_json(Account(userId=1, extra="**********"), max_bytes=LIMIT)


def test_a_secret_is_not_offered_to_the_serializer() -> None:
    assert field_of({"a": SecretStr("canary")}, serializer=str) == "payload.a"


def test_a_model_that_recurs_without_secrets_is_accepted() -> None:
    class Tree(BaseModel):
        children: list[Tree] = []

    assert to_json(Tree(children=[Tree()]), max_bytes=LIMIT) == '{"children":[{"children":[]}]}'


# --- topics -----------------------------------------------------------------------------------------------------------


def test_a_topic_settles_what_it_defines() -> None:
    topic = Topic(
        "mail.activation",
        payload=Account,
        queue="critical",
        destination=lambda a: f"mailto:{a.email}",
        coalesce_key=lambda a: str(a.user_id),
        dedupe_key=lambda a: f"activation-{a.user_id}",
        delay=timedelta(minutes=1),
        expires_after=3600,
    )
    assert draft_of(topic, Account(userId=7, email="a@example.org")) == Draft(
        topic="mail.activation",
        payload='{"userId":7,"email":"a@example.org","addresses":[],"extra":null}',
        queue="critical",
        destination="mailto:a@example.org",
        coalesce_key="7",
        dedupe_key="activation-7",
        available_at=None,
        delay_seconds=60.0,
        expires_at=None,
        expires_after_seconds=3600.0,
        headers=None,
        max_attempts=DEFAULT,
    )


@pytest.mark.parametrize(
    ("definition", "option"),
    [
        ({"queue": "bulk"}, {"queue": "bulk"}),
        ({"destination": "mailto:a@b"}, {"destination": "mailto:c@d"}),
        ({"destination": lambda _: None}, {"destination": "mailto:c@d"}),
        ({"coalesce_key": lambda _: None}, {"coalesce_key": ""}),
        ({"dedupe_key": str}, {"dedupe_key": "x"}),
        ({"delay": 0}, {"delay": 1}),
        ({"delay": 1}, {"available_at": NOW}),
        ({"expires_after": 60}, {"expires_at": NOW + timedelta(days=1)}),
        ({"retry": RetryPolicy()}, {"max_attempts": 3}),
    ],
)
def test_a_call_site_cannot_pass_what_the_topic_defines(definition: dict[str, Any], option: dict[str, object]) -> None:
    (field,) = option
    text = refusal(Topic("mail.news", **definition), {}, **option)
    assert text == f"{field}: belongs to the definition of topic 'mail.news'; do not pass it"


def test_a_call_site_may_choose_what_the_topic_leaves_open() -> None:
    draft = draft_of(Topic("a", queue="bulk"), 1, destination="https://example.org", headers={"trace": "1"})
    assert (draft.queue, draft.destination, draft.headers) == ("bulk", "https://example.org", '{"trace":"1"}')


def test_what_a_function_of_the_topic_returns_is_checked() -> None:
    assert refusal(Topic("a", destination=lambda _: "no uri"), 1).startswith("destination: must be a URI")
    assert refusal(Topic("a", coalesce_key=lambda _: 7), 1) == "coalesce_key: must be text, not int"  # type: ignore[arg-type, return-value]


def test_what_a_function_of_the_topic_raises_passes_through() -> None:
    with pytest.raises(ZeroDivisionError):
        draft_of(Topic("a", dedupe_key=lambda _: str(1 / 0)), 1)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"name": "Mail"}, "name: must be 1 to 63"),
        ({"name": 7}, "name: must be 1 to 63"),
        ({"name": "a", "queue": "a b"}, "queue: must be 1 to 63"),
        ({"name": "a", "destination": "x"}, "destination: must be a URI"),
        ({"name": "a", "delay": -1}, "delay: must be from 0"),
        ({"name": "a", "expires_after": math.inf}, "expires_after: must be from 0"),
        ({"name": "a", "expires_after": 0}, "expires_after: must be more than 0"),
        ({"name": "a", "payload": dict}, "payload: must be a pydantic model"),
        ({"name": "a", "payload": "Account"}, "payload: must be a pydantic model"),
    ],
)
def test_a_wrong_definition_is_a_configuration_error_that_names_the_field(
    arguments: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigurationError, match=f"^topic .*: {problem}"):
        Topic(**arguments)


# --- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a", "mail.activation", "a_b-c.9", "a" * 63])
def test_a_name_of_lower_case_letters_digits_and_punctuation_is_accepted(name: str) -> None:
    assert check_name("topic", name) == name


BAD_NAMES = [
    "", " ", "\0", "a\n", "\na", "'; drop", 'a"', "$$", "a\\", "a" * 64, "é", "a\U0001f600", "a\u202eb", "pG_x", "_a",
    "9a", ".a", "A", "a b", "a/b", None, 7, b"a", ["a"],
]  # fmt: skip


@pytest.mark.parametrize("name", BAD_NAMES)
def test_any_other_name_is_refused_with_its_field(name: object) -> None:
    with pytest.raises(PayloadError, match=r"^topic: must be 1 to 63 of a-z, 0-9, underscore, dot and hyphen"):
        check_name("topic", name)


@pytest.mark.parametrize("name", BAD_NAMES)
def test_the_queue_obeys_the_same_rule(name: object) -> None:
    if name is not None:
        assert refusal(queue=name).startswith("queue: must be 1 to 63")


@pytest.mark.parametrize("key", ["", " ", "a\nb", "é" * 256, "'; drop", "\u202e"])
def test_a_key_is_any_text_of_up_to_512_bytes(key: str) -> None:
    assert check_key("dedupe_key", key) == key


@pytest.mark.parametrize(
    ("key", "problem"),
    [
        ("é" * 257, "has 514 bytes, the limit is 512"),
        ("x" * 10_000, "has 10000 bytes, the limit is 512"),
        ("a\0", "NUL at character 1 is not storable"),
        ("\ud800", "lone surrogate U+D800 at character 0 is not storable"),
        (7, "must be text, not int"),
        (b"a", "must be text, not bytes"),
    ],
)
@pytest.mark.parametrize("field", ["coalesce_key", "dedupe_key"])
def test_any_other_key_is_refused(field: str, key: object, problem: str) -> None:
    assert refusal(**{field: key}) == f"{field}: {problem}"


@pytest.mark.parametrize(
    "uri", ["mailto:a@example.org", "https://example.org/ä?q=1", "x+y-z.1:a b", "urn:" + "x" * 2044]
)
def test_a_destination_is_a_uri(uri: str) -> None:
    assert draft_of(destination=uri).destination == uri


@pytest.mark.parametrize(
    "uri",
    [
        "", "a@example.org", ":x", "mailto:", "1x:y", "mailto:a\n", "mailto:a\r\nBcc: b", "mailto:\0", "m:\ud800",
        "m:\u2028", "m:\x85", "urn:" + "x" * 2045, "m:" + "é" * 1024, 7,
    ],
)  # fmt: skip
def test_any_other_destination_is_refused(uri: object) -> None:
    assert refusal(destination=uri).startswith("destination: ")


@pytest.mark.parametrize(
    ("headers", "problem"),
    [
        ([("a", "b")], "headers: must be a mapping of text to text, not list"),
        ("ab", "headers: must be a mapping of text to text, not str"),
        ({"": "b"}, 'headers[""]: a name must be text, not empty and without control characters'),
        ({7: "b"}, "headers[7]: a name must be text, not empty and without control characters"),
        ({"a\r": "b"}, 'headers["a\\r"]: a name must be text, not empty and without control characters'),
        ({"a": 7}, "headers.a: must be text without control characters"),
        ({"a": None}, "headers.a: must be text without control characters"),
        ({"a": "b\r\nBcc: x"}, "headers.a: must be text without control characters"),
        ({"a": "\0"}, "headers.a: must be text without control characters"),
        ({"a": "\udc80"}, "headers.a: must be text without control characters"),
        ({f"h{n}": "" for n in range(65)}, "headers: has 65 entries, the limit is 64"),
    ],
)
def test_headers_that_are_not_plain_texts_are_refused(headers: object, problem: str) -> None:
    assert refusal(headers=headers) == problem


def test_sixty_four_headers_are_accepted() -> None:
    headers = {f"h{n}": "ä" for n in range(64)}
    assert json.loads(draft_of(headers=headers).headers or "") == headers


@pytest.mark.parametrize("count", [0, -1, 10_001, 1.5, True, "3", HUGE])
def test_max_attempts_outside_1_to_10000_is_refused(count: object) -> None:
    assert refusal(max_attempts=count).startswith("max_attempts: must be a whole number from 1 to 10000")


def test_the_call_sites_max_attempts_wins_over_the_handlers() -> None:
    assert draft_of("a").max_attempts == DEFAULT
    assert draft_of("a", queue="bulk").max_attempts == DEFAULT
    assert draft_of("a", max_attempts=2).max_attempts == 2


@pytest.mark.parametrize("delay", [0, 0.5, 3650 * 86_400, timedelta(0), timedelta(days=3650)])
def test_a_delay_is_seconds_or_a_timedelta_of_up_to_ten_years(delay: float | timedelta) -> None:
    seconds = delay.total_seconds() if isinstance(delay, timedelta) else delay
    assert draft_of(delay=delay).delay_seconds == seconds


@pytest.mark.parametrize(
    "delay",
    [
        -1, -0.1, -1e-9, math.nan, math.inf, -math.inf, 1e300, 10**400, HUGE, timedelta(-1), timedelta.max,
        timedelta.min, True, "5", Decimal(5),
    ],
)  # fmt: skip
def test_any_other_delay_is_refused(delay: object) -> None:
    assert refusal(delay=delay).startswith("delay: must be from 0 to 315360000 seconds")


@pytest.mark.parametrize("field", ["available_at", "expires_at"])
def test_a_time_without_a_time_zone_is_refused(field: str) -> None:
    naive = datetime(2026, 1, 2)  # noqa: DTZ001 - the point of the test
    assert refusal(**{field: naive}) == f"{field}: timezone required: 2026-01-02T00:00:00 is naive"


@pytest.mark.parametrize("field", ["available_at", "expires_at"])
@pytest.mark.parametrize("value", [date(2026, 1, 1), "2026-01-01", 0, "infinity"])
def test_a_time_that_is_no_datetime_is_refused(field: str, value: object) -> None:
    assert refusal(**{field: value}) == f"{field}: must be a datetime, not {type(value).__name__}"


FAR_EAST, FAR_WEST = timezone(timedelta(hours=14)), timezone(timedelta(hours=-14))


@pytest.mark.parametrize("zone", [UTC, FAR_EAST, FAR_WEST])
@pytest.mark.parametrize("field", ["available_at", "expires_at"])
def test_a_time_at_the_end_of_the_calendar_is_refused(field: str, zone: timezone) -> None:
    assert " years ahead: 9999-" in refusal(**{field: datetime.max.replace(tzinfo=zone)})


def test_a_time_more_than_ten_years_ahead_is_refused() -> None:
    assert "not be more than 10 years ahead" in refusal(available_at=NOW + timedelta(days=3660))
    assert draft_of(available_at=NOW + timedelta(days=3640)).available_at


@pytest.mark.parametrize("zone", [UTC, FAR_EAST, FAR_WEST])
def test_an_available_at_in_the_past_is_accepted(zone: timezone) -> None:
    assert draft_of(available_at=datetime.min.replace(tzinfo=zone)).available_at == datetime(1970, 1, 1, tzinfo=UTC)


def test_times_are_written_in_utc() -> None:
    moment = datetime(2026, 1, 2, 12, tzinfo=FAR_EAST)
    written = draft_of(available_at=moment).available_at
    assert written == moment
    assert written is not None
    assert written.tzinfo is UTC


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"expires_at": NOW - timedelta(days=2)}, "expires_at: is in the past"),
        ({"expires_at": datetime.min.replace(tzinfo=FAR_EAST)}, "expires_at: is in the past"),
        (
            {"expires_at": NOW + timedelta(days=3), "available_at": NOW + timedelta(days=3)},
            "expires_at: must be later than available_at",
        ),
        (
            {"expires_at": NOW + timedelta(days=3), "delay": timedelta(days=5)},
            "expires_at: must be later than the end of the delay",
        ),
        ({"available_at": NOW, "delay": 0}, "delay: give delay or available_at, not both"),
    ],
)
def test_times_that_contradict_each_other_are_refused(options: dict[str, object], problem: str) -> None:
    assert refusal(**options).startswith(problem)


def test_what_only_the_databases_clock_can_decide_is_left_to_it() -> None:
    assert draft_of(expires_at=NOW - timedelta(hours=1)).expires_at


@pytest.mark.parametrize("value", [0, 2**63, True, "1", 1.0])
def test_a_whole_number_is_neither_a_truth_value_nor_a_text(value: object) -> None:
    with pytest.raises(PayloadError):
        check_whole("message_id", value, most=2**63 - 1)


# --- bulks ------------------------------------------------------------------------------------------------------------


def test_columns_are_lines_for_what_every_message_has_and_arrays_for_what_some_have() -> None:
    drafts = [draft_of("a", {"x": "1\n2"}), draft_of("b", None, coalesce_key="k\n", delay=2)]
    assert columns(drafts) == (
        "a\nb", '{"x":"1\\n2"}\nnull', None, None, [None, "k\n"], None, None, [None, 2.0], None, None, None,
        [DEFAULT, DEFAULT], None, None, None,
    )  # fmt: skip


def test_unkeyed_messages_come_first_in_their_order_and_keyed_ones_after_them_in_the_order_of_locks() -> None:
    drafts = [
        draft_of("b", coalesce_key="z"),
        draft_of("b"),
        draft_of("b", coalesce_key="a", dedupe_key="z"),
        draft_of("a", dedupe_key="z"),
        draft_of("a"),
        draft_of("a", coalesce_key="z"),
        draft_of("b", coalesce_key="z"),
        draft_of("b", coalesce_key=""),
        draft_of("a", ordering_key="z", queue="bulk"),
        draft_of("b", ordering_key="a"),
        draft_of("a", ordering_key="a", queue="bulk"),
    ]
    assert list(chunks(drafts)) == [[1, 4, 10, 8, 9, 5, 3, 7, 2, 0, 6]]


def test_a_chunk_is_bounded_in_rows_and_in_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    small = [draft_of("a", 1)] * (2 * CHUNK_ROWS + 1)
    assert [len(chunk) for chunk in chunks(small)] == [CHUNK_ROWS, CHUNK_ROWS, 1]
    monkeypatch.setattr("pgoutbox.drafts.CHUNK_CHARACTERS", 10)
    large = [draft_of("a", "x" * size) for size in (3, 3, 3, 30, 3)]
    assert list(chunks(large)) == [[0, 1], [2], [3], [4]]


class Versioned(BaseModel):
    name: str

    @field_validator("name")
    @classmethod
    def _lower(cls, name: str) -> str:
        if not name.islower():
            raise ValueError("must be lower case")
        return name


def test_the_words_of_the_models_own_validator_reach_the_caller() -> None:
    text = refusal(Topic("a", payload=Versioned), {"name": "X"})
    assert text == "payload.name: does not fit Versioned: Value error, must be lower case"
