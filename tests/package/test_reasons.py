"""The reasons that pgoutbox writes itself are readable, whatever names an application hides."""

from __future__ import annotations

import ast
import dataclasses
import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

import pgoutbox
from pgoutbox import CloudEvent, Email, Notification, RawEmail, Webhook
from pgoutbox.redaction import OWN_FIELDS, REDACTED_NAMES, redact_text

if TYPE_CHECKING:
    from collections.abc import Iterator

    import psycopg

PACKAGE: Final = Path(pgoutbox.__file__).parent
OUTCOMES: Final = frozenset({"Permanent", "Transient", "SendFailure", "Unavailable", "Skip"})
CONTENTS: Final[dict[str, type]] = {
    "email": Email, "raw_email": RawEmail, "webhook": Webhook, "event": CloudEvent, "notification": Notification,
}  # fmt: skip
# A path such as `email.headers['X']` before the colon of a reason.
FIELD: Final = re.compile(rf"((?:{'|'.join(CONTENTS)})\.\w+|destination)(?:\[[^\]]*\]\S*)?: ")


def reasons() -> Iterator[tuple[str, str]]:
    """Yield the place and the text of each literal reason; a value is the word kind, or a field at the beginning."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in OUTCOMES
                and node.args
            ):
                text = _text_of(node.args[0])
                if text is not None:
                    yield f"{path.relative_to(PACKAGE)}:{node.lineno}", text


def _text_of(node: ast.expr) -> str | None:
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=[ast.FormattedValue(), ast.Constant(value=str(first)), *_]) if first.startswith(": "):
            return "raw_email.data" + _joined(node.values[1:])
        case ast.JoinedStr(values=values):
            return _joined(values)
        case _:
            return None


def _joined(values: list[ast.expr]) -> str:
    return "".join(str(part.value) if isinstance(part, ast.Constant) else "kind" for part in values)


def test_the_field_of_a_reason_is_not_the_name_of_a_secret() -> None:
    found = list(reasons())
    fields = [(place, text, field[1]) for place, text in found if (field := FIELD.match(text))]
    assert len(fields) > 50
    hidden = [
        (place, shown)
        for place, text, field in fields
        if (shown := redact_text(text, (*REDACTED_NAMES, *re.split(r"[._]", field)))) != text
    ]
    assert hidden == []


def test_no_reason_is_hidden_by_default() -> None:
    found = list(reasons())
    assert len(found) > 100
    assert [place for place, text in found if redact_text(text) != text] == []


@pytest.mark.parametrize("kind", CONTENTS)
def test_each_field_of_a_content_may_be_named_in_a_reason(kind: str) -> None:
    assert {field.name for field in dataclasses.fields(CONTENTS[kind])} <= set(OWN_FIELDS[kind])


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("email.to[0]: see https://a:b@example.org", "email.to[0]: see https://(redacted)@example.org"),
        ("email.headers['X-Token']: has token=abc", "email.headers['X-Token']: has token=(redacted)"),
        ("webhook.secret_name: 'shop' has no secret", "webhook.secret_name: 'shop' has no secret"),
        ("it said webhook.secret_name: 'shop'", "it said webhook.secret_name: (redacted)"),
        ("it said raw_email.data: x", "it said raw_email.data: (redacted)"),
        ("data: x", "data: (redacted)"),
        ("email.password: x", "email.password: (redacted)"),
    ],
)
def test_only_the_field_at_the_beginning_stays(rolled_back: psycopg.Connection, text: str, shown: str) -> None:
    assert redact_text(text, (*REDACTED_NAMES, "data")) == shown
    if "data" not in text:
        assert rolled_back.execute("SELECT pgoutbox._redacted_text(%s)", [text]).fetchall() == [(shown,)]
