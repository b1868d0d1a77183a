"""Tests which values are hidden from people, in structures and in texts, and which stay readable."""

from __future__ import annotations

import json
import signal
from typing import TYPE_CHECKING

import pytest
from pydantic import BaseModel, JsonValue, ValidationError

from pgoutbox.errors import ConfigurationError
from pgoutbox.redaction import MAX_TEXT_CHARS, REDACTED, REDACTED_NAMES, redact, redact_text, text_forms
from pgoutbox.settings import load_settings
from pgoutbox.topics import Topic

if TYPE_CHECKING:
    from collections.abc import Iterator

CANARY = "c4n4ry-s3cret"


@pytest.mark.parametrize("name", [*REDACTED_NAMES, "Access-Token", "userPassword", "X-API-Key", "apikey", "Set-Cookie"])
def test_a_value_under_a_sensitive_name_is_hidden_at_any_depth(name: str) -> None:
    assert redact({"to": "ann", "list": [{name: CANARY}], name: {"a": [CANARY]}}) == {
        "to": "ann",
        "list": [{name: REDACTED}],
        name: REDACTED,
    }


@pytest.mark.parametrize("value", [None, 7, "password", ["token"], {"to": "ann", "n": [1, {"passing": True}]}])
def test_other_values_are_not_changed(value: JsonValue) -> None:
    assert redact(value) == value


def test_a_value_of_any_type_is_hidden() -> None:
    assert redact({"token": None, "secret": 7}) == {"token": REDACTED, "secret": REDACTED}


@pytest.mark.parametrize(
    ("value", "hidden"),
    [
        ({"user": {"email": CANARY}}, True),
        ({"order": {"User": {"E-Mail": CANARY}}}, True),
        ({"users": [{"email": CANARY}]}, True),
        ({"user.email": CANARY}, True),
        ({"user": [{"list": 1}, {"email": CANARY}]}, True),
        ({"email": CANARY}, False),
        ({"user": {"name": CANARY}}, False),
        ({"email": {"user": CANARY}}, False),
    ],
)
def test_a_name_with_dots_matches_the_end_of_a_path(value: JsonValue, hidden: bool) -> None:
    assert (CANARY not in json.dumps(redact(value, ("user.email",)))) == hidden


def test_a_text_in_a_payload_is_masked_like_an_error() -> None:
    value: JsonValue = {"link": f"https://example.org/reset/{CANARY}", "lines": [f"iban: {CANARY}"]}
    assert redact(value, ("iban",)) == {"link": f"https://example.org/reset/{REDACTED}", "lines": [f"iban: {REDACTED}"]}


def test_the_input_is_not_modified() -> None:
    value: JsonValue = {"password": CANARY}
    redact(value)
    assert value == {"password": CANARY}


def test_values_quoted_by_pydantic_are_masked() -> None:
    class Reset(BaseModel):
        code: int

    with pytest.raises(ValidationError) as caught:
        Reset.model_validate({"code": CANARY})
    assert CANARY in str(caught.value)
    assert CANARY not in redact_text(str(caught.value))


def test_in_a_text_the_last_part_of_a_path_counts() -> None:
    assert redact_text(f"email={CANARY}", ("user.email",)) == f"email={REDACTED}"


@pytest.fixture
def limited() -> Iterator[None]:
    """Fail if the test computes for five seconds: a search in linear time takes a tenth of one."""

    def fail(number: int, frame: object) -> None:
        pytest.fail("the search does not take linear time")

    before = signal.signal(signal.SIGVTALRM, fail)
    signal.setitimer(signal.ITIMER_VIRTUAL, 5)
    yield
    signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    signal.signal(signal.SIGVTALRM, before)


@pytest.mark.slow
@pytest.mark.parametrize(
    "piece",
    [
        "a", "a=", "'", "password=", "\\", "://", "password=[", '"password": "', "x@", "eyJ", "eyJa.", "eyJa.b", "AKIA",
        "AIza", "-----BEGIN ", "-----BEGIN PRIVATE KEY-----", "-----END ", "://a:", "://a:b ", "redis://:a/", "passwd ",
        "pwd\t", "?key", "&key=", "pass", "aB", "AB", "token", "/reset/", "4111 ", "password=(", "token=a(", "x,a",
        "password: ", "password:\n", "cookie:", "basic a", "--token ", "AUTH PLAIN ", "curl -u a",
        "-", "secret\\\"",
    ],
)  # fmt: skip
def test_a_long_text_is_masked_in_linear_time(limited: None, piece: str) -> None:
    # The number of steps grows with the length, not with its square: at this length the difference is a minute.
    long = piece * (80_000 // len(piece))
    hints = " ".join(hint for form in text_forms() for hint in form.hints)
    assert isinstance(redact_text(f"?{long} --{long} {hints}://{long}"), str)


def test_a_text_is_cut_off_before_it_is_searched() -> None:
    assert redact_text("a" * MAX_TEXT_CHARS + "b") == "a" * MAX_TEXT_CHARS


def test_names_can_be_added() -> None:
    names = load_settings(redact="iban, user.email ").redacted_names
    assert names == (*REDACTED_NAMES, "iban", "user.email")
    assert load_settings().redacted_names == REDACTED_NAMES


@pytest.mark.parametrize("names", ["a,,b", ",", "user.", "-"])
def test_an_empty_name_is_refused(names: str) -> None:
    with pytest.raises(ConfigurationError, match=r"PGOUTBOX_REDACT=.*is not a valid name"):
        load_settings(redact=names)


@pytest.mark.parametrize("names", ["user.email", ["email"], ("",), (7,), ("a..b",)])
def test_a_topic_refuses_anything_but_a_tuple_of_names(names: tuple[str, ...]) -> None:
    with pytest.raises(ConfigurationError, match="topic 'mail': redact: "):
        Topic("mail", redact=names)
