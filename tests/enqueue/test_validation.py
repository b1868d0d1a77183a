"""Tests the validation of enqueued messages, and the path in each refusal."""

from __future__ import annotations

import json
import math
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

import psycopg
import pytest

from pgoutbox.enqueue.validation import CHUNK_ROWS, Bulk, Draft, Route, carrying, message_json, prepare
from pgoutbox.errors import ArgumentError, ConfigurationError
from pgoutbox.options import check_key, check_name, check_whole
from pgoutbox.retry import RetryPolicy
from pgoutbox.topics import NewMessage, Topic
from tests.support.drafts import DEFAULT, LIMIT, Account, draft_of, refusal

HUGE = pytest.param(10**5000, id="5001 digits")  # More digits than Python converts.
NOW = datetime.now(UTC)


# --- topics -----------------------------------------------------------------------------------------------------------


def test_a_topic_sets_the_options_that_it_defines() -> None:
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
        options={
            "queue": "critical",
            "destination": "mailto:a@example.org",
            "coalesce_key": "7",
            "dedupe_key": "activation-7",
            "delay": 60.0,
            "expires_after": 3600.0,
            "max_attempts": DEFAULT,
        },
    )


@pytest.mark.parametrize(
    ("definition", "option"),
    [
        ({"queue": "bulk"}, {"queue": "bulk"}),
        ({"destination": "mailto:a@b"}, {"destination": "mailto:c@d"}),
        ({"destination": lambda _: None}, {"destination": "mailto:c@d"}),
        ({"coalesce_key": lambda _: None}, {"coalesce_key": "x"}),
        ({"dedupe_key": str}, {"dedupe_key": "x"}),
        ({"delay": 0}, {"delay": 1}),
        ({"delay": 1}, {"available_at": NOW}),
        ({"expires_after": 60}, {"expires_at": NOW + timedelta(days=1)}),
        ({"retry": RetryPolicy()}, {"max_attempts": 3}),
    ],
)
def test_a_call_cannot_pass_options_that_the_topic_defines(
    definition: dict[str, Any], option: dict[str, object]
) -> None:
    (field,) = option
    text = refusal(Topic("mail.news", **definition), {}, **option)
    assert text == f"{field}: belongs to the definition of topic 'mail.news'; do not pass it"


def test_a_call_may_pass_options_that_the_topic_leaves_open() -> None:
    draft = draft_of(Topic("a", queue="bulk"), 1, destination="https://example.org", headers={"trace": "1"})
    assert draft.options == {
        "queue": "bulk",
        "destination": "https://example.org",
        "headers": {"trace": "1"},
        "max_attempts": DEFAULT,
    }


def test_the_result_of_a_topic_function_is_validated() -> None:
    assert refusal(Topic("a", destination=lambda _: "no uri"), 1).startswith("destination: must be a URI")
    assert refusal(Topic("a", coalesce_key=lambda _: 7), 1) == "coalesce_key: must be text, not int"  # type: ignore[arg-type, return-value]


def test_an_exception_of_a_topic_function_passes_through() -> None:
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
        ({"name": "a", "expires_after": lambda _: 60}, "expires_after: must be from 0 to .*, not <function"),
        ({"name": "a", "payload": dict}, "payload: must be a pydantic model"),
        ({"name": "a", "payload": "Account"}, "payload: must be a pydantic model"),
    ],
)
def test_an_invalid_definition_is_a_configuration_error_that_names_the_field(
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
    with pytest.raises(ArgumentError, match=r"^topic: must be 1 to 63 of a-z, 0-9, underscore, dot and hyphen"):
        check_name("topic", name)


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_queue_name_has_the_same_rule(name: object) -> None:
    if name is not None:
        assert refusal(queue=name).startswith("queue: must be 1 to 63")


@pytest.mark.parametrize("key", [" ", "a\nb", "é" * 256, "'; drop", "\u202e"])
def test_a_key_is_any_text_of_up_to_512_bytes(key: str) -> None:
    assert check_key("dedupe_key", key) == key


@pytest.mark.parametrize(
    ("key", "problem"),
    [
        ("", "must not be empty; pass None for no key"),
        ("é" * 257, "has 514 bytes, the limit is 512"),
        ("x" * 10_000, "has 10000 bytes, the limit is 512"),
        ("a\0", "NUL at character 1 is not storable"),
        ("\ud800", "lone surrogate U+D800 at character 0 is not storable"),
        (7, "must be text, not int"),
        (b"a", "must be text, not bytes"),
    ],
)
@pytest.mark.parametrize("field", ["coalesce_key", "dedupe_key", "ordering_key"])
def test_any_other_key_is_refused_whether_given_or_computed(field: str, key: object, problem: str) -> None:
    assert refusal(**{field: key}) == f"{field}: {problem}"
    computed: dict[str, Any] = {field: lambda _: key}
    assert refusal(Topic("mail", **computed)) == f"{field}: {problem}"


@pytest.mark.parametrize(
    "uri", ["mailto:a@example.org", "https://example.org/ä?q=1", "x+y-z.1:a b", "urn:" + "x" * 2044]
)
def test_a_destination_is_a_uri(uri: str) -> None:
    assert draft_of(destination=uri).options["destination"] == uri


@pytest.mark.parametrize(
    "uri",
    [
        "", "a@example.org", ":x", "mailto:", "1x:y", "mailto:a\n", "mailto:a\r\nBcc: b", "mailto:\0", "m:\ud800",
        "m:\u2028", "m:\x85", "urn:" + "x" * 2045, "m:" + "é" * 1024, 7,
    ],
)  # fmt: skip
def test_any_other_destination_is_refused(uri: object) -> None:
    assert refusal(destination=uri).startswith("destination: ")


@pytest.mark.parametrize("uri", ["mailto:a@example.org,b@example.org", "MAILTO:a@example.org,"])
def test_a_mailto_destination_names_one_recipient(uri: str) -> None:
    problem = "must name one recipient, without a comma; enqueue one message for each, or render Email(to=[...])"
    assert refusal(destination=uri) == f"destination: {problem}"
    topic = Topic("mail", destination=lambda _: uri)
    assert refusal(topic) == f"destination: {problem}"
    assert draft_of(destination="https://example.org/?a=1,2").options["destination"] == "https://example.org/?a=1,2"


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
        ({"a": "é" * 32_768}, "headers: has 65544 bytes as JSON, the limit is 65536"),
    ],
)
def test_invalid_headers_are_refused(headers: object, problem: str) -> None:
    assert refusal(headers=headers) == problem


def test_a_trace_does_not_push_large_headers_over_their_limit() -> None:
    headers = {"a": "x" * 65_520}
    message = carrying(NewMessage("mail", 1, headers=headers), {"traceparent": "00-1-2-01"})
    assert draft_of("mail", 1, **message.options).options["headers"] == headers


def test_sixty_four_headers_are_accepted() -> None:
    headers = {f"h{n}": "ä" for n in range(64)}
    assert draft_of(headers=headers).options["headers"] == headers


@pytest.mark.parametrize("count", [0, -1, 10_001, 1.5, True, "3", HUGE])
def test_max_attempts_outside_1_to_10000_is_refused(count: object) -> None:
    assert refusal(max_attempts=count).startswith("max_attempts: must be a whole number from 1 to 10000")


def test_max_attempts_of_the_call_takes_precedence_over_the_handlers() -> None:
    assert draft_of("a").options["max_attempts"] == DEFAULT
    assert draft_of("a", queue="bulk").options["max_attempts"] == DEFAULT
    assert draft_of("a", max_attempts=2).options["max_attempts"] == 2


@pytest.mark.parametrize("delay", [0, 0.5, 3650 * 86_400, timedelta(0), timedelta(days=3650)])
def test_a_delay_is_seconds_or_a_timedelta_of_up_to_ten_years(delay: float | timedelta) -> None:
    seconds = delay.total_seconds() if isinstance(delay, timedelta) else delay
    assert draft_of(delay=delay).options["delay"] == seconds


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
def test_a_time_of_another_type_is_refused(field: str, value: object) -> None:
    assert refusal(**{field: value}) == f"{field}: must be a datetime, not {type(value).__name__}"


FAR_EAST, FAR_WEST = timezone(timedelta(hours=14)), timezone(timedelta(hours=-14))


@pytest.mark.parametrize("zone", [UTC, FAR_EAST, FAR_WEST])
@pytest.mark.parametrize("field", ["available_at", "expires_at"])
def test_a_time_at_the_end_of_the_calendar_is_refused(field: str, zone: timezone) -> None:
    assert " years ahead: 9999-" in refusal(**{field: datetime.max.replace(tzinfo=zone)})


def test_a_time_more_than_ten_years_ahead_is_refused() -> None:
    assert "not be more than 10 years ahead" in refusal(available_at=NOW + timedelta(days=3660))
    assert draft_of(available_at=NOW + timedelta(days=3640)).options["available_at"]


@pytest.mark.parametrize("zone", [UTC, FAR_EAST, FAR_WEST])
def test_an_available_at_in_the_past_is_accepted(zone: timezone) -> None:
    draft = draft_of(available_at=datetime.min.replace(tzinfo=zone))
    assert draft.options["available_at"] == datetime(1970, 1, 1, tzinfo=UTC)


def test_times_are_written_in_utc() -> None:
    moment = datetime(2026, 1, 2, 12, tzinfo=FAR_EAST)
    assert '"available_at":"2026-01-01T22:00:00Z"' in (draft_of(available_at=moment).options_json or "")


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
def test_contradictory_times_are_refused(options: dict[str, object], problem: str) -> None:
    assert refusal(**options).startswith(problem)


def test_checks_against_the_clock_are_left_to_the_database() -> None:
    assert draft_of(expires_at=NOW - timedelta(hours=1)).options["expires_at"]


@pytest.mark.parametrize("value", [0, 2**63, True, "1", 1.0])
def test_an_integer_is_neither_a_boolean_nor_a_text(value: object) -> None:
    with pytest.raises(ArgumentError):
        check_whole("message_id", value, most=2**63 - 1)


# --- bulks ------------------------------------------------------------------------------------------------------------


def bulk_of(*drafts: Draft) -> Bulk:
    bulk = Bulk()
    for draft in drafts:
        bulk.add(draft)
    return bulk


def positions(*drafts: Draft) -> list[list[int]]:
    return [list(chunk) for chunk, _ in bulk_of(*drafts).chunks()]


def test_options_are_json_and_absent_without_any() -> None:
    draft = prepare(NewMessage("a", 1), Route(Topic("a"), max_attempts=None, max_payload_bytes=LIMIT))
    assert draft == Draft("a", "1", {})
    assert draft.options_json is None
    options = draft_of(delay=timedelta(minutes=1), headers={"a": "ä"}, ordering_key="k", halts_key=False).options_json
    assert json.loads(options or "") == {
        "delay": 60.0,
        "headers": {"a": "ä"},
        "ordering_key": "k",
        "halts_key": False,
        "max_attempts": DEFAULT,
    }


def test_a_bulk_is_an_array_of_objects_with_the_given_options() -> None:
    bulk = bulk_of(draft_of("a", {"x": "1\n2"}), draft_of("b", None, coalesce_key="k\n", delay=2))
    chunks = [(list(chunk), json.loads(messages)) for chunk, messages in bulk.chunks()]
    assert len(bulk) == 2
    assert chunks == [
        ([0], [{"topic": "a", "payload": {"x": "1\n2"}, "max_attempts": DEFAULT}]),
        (
            [1],
            [{"topic": "b", "payload": None, "coalesce_key": "k\n", "delay": 2.0, "max_attempts": DEFAULT}],
        ),
    ]


def test_an_empty_bulk_has_no_chunks() -> None:
    assert positions() == []


@pytest.mark.parametrize("text", ["a", "NULL", "{}", ",", '"', "\\", '\\"', " a ", "\n\x01é😀", "\\u0000"])
def test_any_text_of_a_message_reads_back_the_same(rolled_back: psycopg.Connection, text: str) -> None:
    ((_, messages),) = bulk_of(draft_of("a", {text: text}, dedupe_key=text, coalesce_key=text)).chunks()
    rolled_back.execute("SELECT FROM pgoutbox.enqueue_many(%s::text::jsonb)", [messages])
    rows = rolled_back.execute("SELECT m.payload, m.dedupe_key, m.coalesce_key FROM pgoutbox.message AS m")
    assert rows.fetchall() == [({text: text}, text, text)]


def test_a_bulk_has_all_messages_with_keys_in_its_last_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """PostgreSQL locks the keys of a piece in one order."""
    drafts = [
        draft_of("b", coalesce_key="z"),
        draft_of("b"),
        draft_of("b", coalesce_key="a", dedupe_key="z"),
        draft_of("a", dedupe_key="z"),
        draft_of("a"),
        draft_of("a", queue="bulk"),
        draft_of("a", ordering_key="z", queue="bulk"),
    ]
    keyed = [0, 2, 3, 6]
    assert positions(*drafts) == [[1, 4, 5], keyed]
    assert positions(*(drafts[position] for position in keyed)) == [[0, 1, 2, 3]]
    monkeypatch.setattr("pgoutbox.enqueue.validation.CHUNK_ROWS", 1)
    monkeypatch.setattr("pgoutbox.enqueue.validation.CHUNK_CHARACTERS", 1)
    assert positions(*drafts) == [[1], [4], [5], keyed]


def test_a_chunk_is_limited_in_rows_and_in_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    small = [draft_of("a", 1)] * (2 * CHUNK_ROWS + 1)
    assert [len(chunk) for chunk in positions(*small)] == [CHUNK_ROWS, CHUNK_ROWS, 1]
    monkeypatch.setattr("pgoutbox.enqueue.validation.CHUNK_CHARACTERS", 2 * len(message_json(draft_of("a", "xxx"))))
    large = [draft_of("a", "x" * size) for size in (3, 3, 3, 300, 3)]
    assert positions(*large) == [[0, 1], [2], [3], [4]]


def test_messages_with_keys_are_split_only_by_their_own_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    draft = draft_of("a", dedupe_key="k")
    monkeypatch.setattr("pgoutbox.enqueue.validation.KEYED_CHARACTERS", 2 * len(message_json(draft)))
    assert positions(*[draft] * 5) == [[0, 1], [2, 3], [4]]
