"""Tests the problems with e-mail that a worker finds in its settings and handlers before any message has to wait."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pytest

from pgoutbox import Context, Email, Message, Skip
from pgoutbox.transports.readiness import Lack, is_example, is_reserved, lacks_of_mail
from pgoutbox.worker.alert import render_alert
from tests.support.settings import settings_with

if TYPE_CHECKING:
    from pgoutbox.transports import Content

COMPLETE: dict[str, object] = {"smtp_host": "mail.club.org", "smtp_sender": "Club <a@club.org>"}


async def plain(message: Message, ctx: Context) -> Email:
    return Email(subject="Hello", text="Hi")


def either(message: Message, ctx: Context) -> Email | Skip | None:
    return None


async def batch(messages: Sequence[Message], contexts: Sequence[Context]) -> list[Email]:
    return []


class Greeter:
    """A handler that is an object."""

    async def __call__(self, message: Message, ctx: Context) -> Email:
        return Email(subject="Hello", text="Hi")


async def nothing(message: Message, ctx: Context) -> None: ...


async def unannotated(message, ctx):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN201 - as applications may
    return None


async def unresolvable(message: Message, ctx: Context) -> Content | None:
    return None


def lacks(
    settings: Mapping[str, object], functions: Mapping[str, Any] | None = None, schemes: Sequence[str] = ()
) -> list[Lack]:
    return list(lacks_of_mail(settings_with(**settings), schemes, functions or {}))


def test_topics_whose_handlers_return_an_email_need_a_mail_server() -> None:
    functions = {
        "a.plain": plain, "b.either": either, "c.batch": batch, "d.object": Greeter(), "e.nothing": nothing,
        "f.unannotated": unannotated, "g.unresolvable": unresolvable, "pgoutbox.alert": render_alert,
    }  # fmt: skip
    topics = ("a.plain", "b.either", "c.batch", "d.object", "pgoutbox.alert")
    assert lacks({}, functions) == [Lack("PGOUTBOX_SMTP_HOST", "is not set", topics)]
    assert lacks({}, functions, ["mailto"]) == [], "the application has its own transport"
    assert lacks(COMPLETE, functions) == []
    assert lacks({}, {"e.nothing": nothing}) == []


@pytest.mark.parametrize("settings", [{"smtp_sender": "a@club.org"}, {"smtp_username": "club", "smtp_password": "x"}])
def test_email_settings_without_a_server_are_a_problem(settings: dict[str, object]) -> None:
    assert lacks(settings) == [Lack("PGOUTBOX_SMTP_HOST", "is not set")]


@pytest.mark.parametrize(
    ("overrides", "lack"),
    [
        ({"smtp_sender": None}, Lack("PGOUTBOX_SMTP_SENDER", "is not set")),
        ({"smtp_sender": "Club <you@example.org>"}, Lack("PGOUTBOX_SMTP_SENDER", "is an example of the documentation")),
        ({"smtp_host": "smtp.example.com"}, Lack("PGOUTBOX_SMTP_HOST", "is an example of the documentation")),
        (
            {"alert_destination": "mailto:ops@example.org"},
            Lack("PGOUTBOX_ALERT_DESTINATION", "is an example of the documentation"),
        ),
    ],
)
def test_a_missing_sender_and_example_values_are_problems(overrides: dict[str, object], lack: Lack) -> None:
    assert lacks(COMPLETE | overrides) == [lack]


@pytest.mark.parametrize(
    ("address", "example", "reserved"),
    [
        ("a@example.org", True, False),
        ("A <a@mail.example.com>", True, False),
        ("a@b.example", True, False),
        ("a@shop.test", False, True),
        ("root@localhost", False, True),
        ("a@club.invalid", False, True),
        ("a@example-club.org", False, False),
        ("a@contest", False, False),
        ("a@example.org.uk", False, False),
    ],
)
def test_example_domains_are_distinguished_from_test_domains(address: str, example: bool, reserved: bool) -> None:
    assert (is_example(address), is_reserved(address)) == (example, reserved)
