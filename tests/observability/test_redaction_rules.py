"""Tests which values are hidden from people, in structures and in texts, and which stay readable."""

from __future__ import annotations

import json
import signal
from dataclasses import dataclass
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


@dataclass
class Login:
    """An object whose repr shows its fields."""

    user: str
    password: str


QUOTING = {
    "repr": repr({"to": "ann", "password": CANARY}),
    "JSON": json.dumps({"to": "ann", "password": CANARY}),
    "JSON in JSON": json.dumps([json.dumps({"to": "ann", "password": CANARY})]),
    "JSON in JSON in a repr": repr([json.dumps([json.dumps({"password": CANARY, "to": "ann"})])]),
    "a list": json.dumps({"password": ["x", CANARY], "to": "ann"}),
    "an object": json.dumps({"password": {"a": 1, "b": ["]", CANARY]}, "to": "ann"}),
    "bytes": repr({"password": CANARY.encode(), "to": "ann"}),
    "dataclass": repr(Login("ann", CANARY)),
    "subscript": f"data['password'] = {CANARY!r}; to ann",
    "form": f"https://example.org/login?to=ann&password={CANARY}&page=2",
    "form in quotes": f'GET "/login?to=ann&password={CANARY}" failed',
    "conninfo": f"host=db user=ann password={CANARY} port=5432",
    "spaces": f"ann: password = {CANARY}",
    "comparison": f"ann: password == {CANARY}",
    "an apostrophe": f"ann: password=it's{CANARY}",
    "a quote": json.dumps({"to": "ann", "password": f'a"{CANARY}'}),
    "an apostrophe in a repr": repr({"to": "ann", "password": f"it's {CANARY}"}),
    "both quotes in a repr": repr({"to": "ann", "password": f'it\'s "{CANARY}"'}),
    "a backslash": json.dumps({"password": "\\", "to": "ann", "token": CANARY}),
    "a call": f"ann: token=Token('a', value={CANARY!r})",
    "a row": f"ann: Key (token)=({CANARY}) already exists",
    "cut off": f"ann: {{'password': '{CANARY}",
    "cut off in brackets": f"ann: {{'password': ['{CANARY}",
    "URL": f"cannot reach https://ann:{CANARY}@example.org/path for ann",
    "URL without a name": f"ann: amqp://{CANARY}@host",
    "URL with an at sign": f"ann: https://u:p@{CANARY}@host/",
    "header": f"ann sent Authorization: Bearer {CANARY}\r\n",
    "two words": f"ann sent authorization=Bearer {CANARY}, once",
    "bearer": f"ann sent Bearer {CANARY}",
    "cookie": f"ann sent Cookie: a=1; session={CANARY}",
    "digits": f'ann: api-key="{CANARY}"',
    "an abbreviation": f"ann: smtp_pass={CANARY}",
    "an abbreviation in a repr": repr({"to": "ann", "pass": CANARY}),
    "an abbreviation of conninfo": f"Uid=ann;Pwd={CANARY};",
    "camel case": repr({"to": "ann", "smtpPass": CANARY}),
    "no equals sign": f"ann: passwd {CANARY}",
    "no equals sign in a sentence": f"ann: the password is {CANARY}!",
    "key of a query": f"https://ann.example.org/maps?key={CANARY}&page=2",
    "signed URL": f"https://ann.example.org/a?X-Amz-Signature={CANARY}&page=2",
    "short signature": f"https://ann.example.org/a?sv=1&sig={CANARY}",
    "jwt by name": f"https://ann.example.org/a?jwt={CANARY}",
    "bare JWT": f"ann: eyJhbGciOiJub25lIn0.{CANARY}.{CANARY} is expired",
    "bare JWT without signature": f"ann: eyJhbGciOiJub25lIn0.{CANARY}.",
    "bare key of AWS": "ann: AKIAIOSFODNN7EXAMPLE".replace("IOSFODNN7EXAMPLE", "C4N4RYS3CRETXXXX"),
    "bare key of Google": f"ann: AIzaSyA-{CANARY}-{CANARY}-1234567890",
    "private key": f"ann: -----BEGIN RSA PRIVATE KEY-----\nMIIE{CANARY}\n-----END RSA PRIVATE KEY-----",
    "private key that is cut off": f"ann: -----BEGIN PRIVATE KEY-----\\nMIIE{CANARY}",
    "URL with a slash in its password": f"ann: amqp://user:pa/{CANARY}@host",
    "URL with a hash in its password": f"ann: redis://:p#{CANARY}@host",
    "URL with a blank in its password": f"ann: amqp://user:pa {CANARY}@host",
    "URL with a question mark in its password": f"ann: https://user:pa?{CANARY}@host/",
    "URL with a slash and an at sign": f"ann: amqp://user:p@a/{CANARY}@host",
}


@pytest.mark.parametrize("text", QUOTING.values(), ids=QUOTING)
def test_a_text_that_quotes_a_value_under_a_sensitive_name_is_masked(text: str) -> None:
    masked = redact_text(text)
    assert CANARY not in masked
    assert REDACTED in masked
    assert "ann" in masked or "an object" in text or masked.index(REDACTED) < 60


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no such mailbox",
        "payload.token: Field required",
        "the token has expired",
        "535 5.7.8 Error: basic authentication failed",
        "PGOUTBOX_SMTP_PASSWORD is not set",
        "to=ann, page=2",
        "https://example.org/a@b?x=1",
        "mailto:ann@example.org",
        'WWW-Authenticate: Bearer realm="x"',
        "3 passengers=3, compass=4, design=5, assignature=6",
        "Key (id)=(7) already exists",
        'password authentication failed for user "ann"',
        "https://example.org:8443/users/ann@example.org",
        "cannot reach nats://example.org:4222, asked ann@example.org",
        "cannot reach https://example.org:443 for ann@example.org",
        "eyJ is how a JSON Web Token begins",
    ],
)
def test_a_text_without_values_is_not_changed(text: str) -> None:
    assert redact_text(text) == text


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
