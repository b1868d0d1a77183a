"""Tests the problems that a worker finds in its settings and handlers before any message has to wait."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pytest

from pgoutbox import CloudEvent, Context, Email, Message, Notification, Outbox, Skip, Webhook
from pgoutbox.observability.events import LogEvent
from pgoutbox.transports.readiness import Lack, is_placeholder, is_reserved, lacks_of
from pgoutbox.worker import Worker
from tests.support.outbox_actions import reports, settings_for
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
    settings: Mapping[str, object],
    functions: Mapping[str, Any] | None = None,
    schemes: Sequence[str] = (),
    destinations: Mapping[str, str] | None = None,
) -> list[Lack]:
    return list(lacks_of(settings_with(**settings), schemes, functions or {}, destinations))


def test_topics_whose_handlers_return_an_email_need_a_mail_server() -> None:
    functions = {
        "a.plain": plain, "b.either": either, "c.batch": batch, "d.object": Greeter(), "e.nothing": nothing,
        "f.unannotated": unannotated, "g.unresolvable": unresolvable, "pgoutbox.alert": nothing,
    }  # fmt: skip
    topics = ("a.plain", "b.either", "c.batch", "d.object", "pgoutbox.alert")
    alerting = {"alert_destination": "mailto:ops@club.org"}
    assert lacks(alerting, functions) == [Lack("PGOUTBOX_SMTP_HOST", "is not set", topics)]
    assert lacks(alerting, functions, ["mailto"]) == [], "the application has its own transport"
    assert lacks(COMPLETE, functions) == []
    assert lacks({}, {"e.nothing": nothing}) == []


def test_a_missing_setting_a_placeholder_and_a_log_have_different_texts() -> None:
    (missing,) = lacks({}, {"a.plain": plain})
    (placeholder,) = lacks(COMPLETE | {"smtp_sender": "you@example.org"}, {"a.plain": plain})
    (logged,) = lacks({"mail_transport": "log"}, {"a.plain": plain})
    assert [lack.text for lack in (missing, placeholder, logged)] == [
        "messages wait for a setting",
        "a setting is still a placeholder, so messages reach nobody or are refused",
        "e-mails are only logged, and reach nobody",
    ]


def test_the_destinations_of_alerts_need_their_transports() -> None:
    alerting = {"alert_destination": "mailto:ops@club.org apprise:phone"}
    found = lacks(alerting, {"pgoutbox.alert": nothing})
    assert {(lack.variable, lack.topics) for lack in found} == {
        ("PGOUTBOX_SMTP_HOST", ("pgoutbox.alert",)),
        ("PGOUTBOX_APPRISE_URLS", ("pgoutbox.alert",)),
    }


async def call(message: Message, ctx: Context) -> Webhook:
    return Webhook(body=1)


async def call_signed(message: Message, ctx: Context) -> Webhook:
    return Webhook(body=1, secrets=[f"whsec_{'A' * 32}"])


async def tell(message: Message, ctx: Context) -> Notification:
    return Notification("Hello", "Hi")


async def publish(message: Message, ctx: Context) -> CloudEvent:
    return CloudEvent(1)


def test_other_contents_need_their_transports_and_settings() -> None:
    functions = {"a.call": call, "b.tell": tell, "c.publish": publish}
    assert lacks({}, functions) == [
        Lack("PGOUTBOX_APPRISE_URLS", "is not set", ("b.tell",)),
        Lack("pgoutbox[webhook]", "is not installed", ("a.call",)),
        Lack("PGOUTBOX_WEBHOOK_SECRETS", "is not set", ("a.call",)),
        Lack("PGOUTBOX_EVENT_SOURCE", "is not set", ("c.publish",)),
    ]
    given = {"webhook_secrets": f"whsec_{'A' * 32}", "event_source": "https://club.org"}
    assert lacks(given, functions, ["https", "apprise"]) == []


async def test_webhooks_with_secrets_of_their_own_are_not_said_to_wait(dsn: str) -> None:
    """Cron would mail a warning after each run."""
    (lack,) = lacks({}, {"a.call": call_signed}, ["https"])
    assert "that name no secrets of their own" in lack.text
    outbox = Outbox(settings_for(dsn))
    outbox.handler("a.call")(call_signed)
    with reports() as heard:
        await Worker(outbox).run_once()
    (record,) = (r for r in heard.records if getattr(r, "event", "") == LogEvent.TRANSPORT_NOT_READY)
    assert (record.levelname, record.getMessage().partition(" event=")[0]) == ("INFO", lack.text)


def test_plain_http_needs_the_setting_only_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    functions, destinations = {"greet": nothing}, {"greet": "http://club.org/hook"}
    assert lacks({}, functions, (), destinations) == [Lack("PGOUTBOX_WEBHOOK_ALLOW_HTTP", "is not set", ("greet",))]
    monkeypatch.setitem(sys.modules, "h11", None)
    allowed = {"webhook_allow_http": True}
    assert lacks(allowed, functions, (), destinations) == [Lack("pgoutbox[webhook]", "is not installed", ("greet",))]


@pytest.mark.parametrize(
    ("destination", "setting"),
    [
        ("redis:orders", "PGOUTBOX_REDIS_URL"),
        ("nats:orders", "PGOUTBOX_NATS_URL"),
        ("rabbitmq:orders", "PGOUTBOX_RABBITMQ_URL"),
        ("kafka:orders", "PGOUTBOX_KAFKA_SERVERS"),
        ("apprise:ops", "PGOUTBOX_APPRISE_URLS"),
        ("mailto:a@club.org", "PGOUTBOX_SMTP_HOST"),
    ],
)
def test_a_fixed_destination_needs_the_transport_of_its_scheme(destination: str, setting: str) -> None:
    functions, destinations = {"greet": nothing}, {"greet": destination, "without.a.handler": "nats:7"}
    assert lacks({}, functions, (), destinations) == [Lack(setting, "is not set", ("greet",))]
    assert lacks({}, functions, [destination.partition(":")[0]], destinations) == []


@pytest.mark.parametrize("settings", [{"smtp_sender": "a@club.org"}, {"smtp_username": "club", "smtp_password": "x"}])
def test_email_settings_without_a_server_are_a_problem(settings: dict[str, object]) -> None:
    assert lacks(settings) == [Lack("PGOUTBOX_SMTP_HOST", "is not set")]


@pytest.mark.parametrize(
    ("overrides", "lack"),
    [
        ({"smtp_sender": None}, Lack("PGOUTBOX_SMTP_SENDER", "is not set")),
        ({"smtp_sender": "Club <you@example.org>"}, Lack("PGOUTBOX_SMTP_SENDER", "is a placeholder")),
        ({"smtp_host": "smtp.example.com"}, Lack("PGOUTBOX_SMTP_HOST", "is a placeholder")),
        (
            {"alert_destination": "mailto:ops@example.org"},
            Lack("PGOUTBOX_ALERT_DESTINATION", "is a placeholder"),
        ),
    ],
)
def test_a_missing_sender_and_example_values_are_problems(overrides: dict[str, object], lack: Lack) -> None:
    assert lacks(COMPLETE | overrides) == [lack]


@pytest.mark.parametrize(
    "address",
    [
        "a@example.org",
        "A <a@mail.example.com>",
        "a@b.example",
        "a@b.EXAMPLE",
        "smtp.example.net",
        "mailto:you@example.edu",
        "you@gmail.com",
        "You <you@club.org>",
        "mailto:you@club.org",
        "your.name@gmail.com",
        "your-email@club.org",
        "user@domain.tld",
        "smtp.provider.tld",
        "CHANGE_ME@club.de",
        "changeme@club.de",
        "info@change-me.de",
        "CHANGE_ME",
        "noreply@yourdomain.com",
        "noreply@your-company.de",
        "mail.my-domain.org",
        "info@ihre-domain.de",
        "xxx@club.org",
    ],
)
def test_placeholders_are_found(address: str) -> None:
    assert is_placeholder(address)
    assert not is_reserved(address)


@pytest.mark.parametrize(
    ("address", "reserved"),
    [
        ("a@shop.test", True),
        ("root@localhost", True),
        ("a@club.invalid", True),
        ("a@example-club.org", False),
        ("a@contest", False),
        ("a@example.org.uk", False),
        ("thankyou@club.org", False),
        ("youth@club.org", False),
        ("you.and.me@club.org", False),
        ("a@exchange-media.org", False),
        ("name@domain.com.au", False),
        ("user@club.org", False),
        ("info@your-garden.org", False),
    ],
)
def test_other_addresses_are_not_placeholders(address: str, reserved: bool) -> None:
    assert (is_placeholder(address), is_reserved(address)) == (False, reserved)
