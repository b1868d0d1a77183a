"""Tests the transport for development: e-mails in the log and in files, and its settings, which production refuses."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest

from pgoutbox import Attachment, Context, Email, Message, Outbox, RawEmail, RetryPolicy
from pgoutbox.doctor import Level, examine
from pgoutbox.errors import ConfigurationError
from pgoutbox.message import Permanent, Sent, Unavailable
from pgoutbox.observability.events import LogEvent
from pgoutbox.testing import OutboxDriver
from pgoutbox.transports.readiness import Lack, lacks_of
from pgoutbox.transports.registry import complete
from pgoutbox.transports.smtp.log import LogTransport
from pgoutbox.transports.smtp.transport import SmtpTransport
from pgoutbox.worker import Worker
from tests.support.outbox_actions import enqueue, row_of, settings_for
from tests.support.sends import error_of, outgoing
from tests.support.settings import settings_with
from tests.support.smtp_server import parsed

if TYPE_CHECKING:
    from pathlib import Path

    import psycopg

    from pgoutbox.message import Outcome
    from pgoutbox.transports import Content

LINK = "https://club.test/reset?token=c4n4ry&page=2"
EMAIL = Email(
    subject="Grüße",
    text=f"Hello Ann,\n\n{LINK}\n",
    to="ann@example.com",
    bcc="eve@example.com",
    headers={"X-Reset-Token": "token=c4n4ry"},
    attachments=[Attachment("a.pdf", b"%PDF")],
)


class Provider:
    """The application's own transport for e-mail."""

    schemes = ("mailto", "sms")

    def __init__(self) -> None:
        self.sent: list[Content] = []

    async def send(self, message: Message[object], content: Content) -> Outcome:
        self.sent.append(content)
        return Sent()

    async def aclose(self) -> None: ...


def outbox_for(dsn: str, content: Content, provider: Provider | None = None, **overrides: object) -> Outbox:
    settings = settings_for(dsn, **{"mail_transport": "log"} | overrides)
    outbox = Outbox(settings, transports=[] if provider is None else [provider])

    @outbox.handler("greet", retry=RetryPolicy.steps(3600, jitter=0))
    async def greet(message: Message, ctx: Context) -> Content:
        return content

    return outbox


def logged(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if getattr(record, "event", "") == LogEvent.EMAIL_LOGGED]


@pytest.mark.slow
async def test_an_email_is_logged_without_its_secrets_and_saved_with_them(
    dsn: str, db: psycopg.Connection, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    message_id = enqueue(db)
    directory = tmp_path / "new" / "mails"
    worker = Worker(outbox_for(dsn, EMAIL, mail_directory=str(directory)))
    with caplog.at_level(logging.INFO):
        await worker.run_once()
    assert row_of(db, message_id).state == "sent"
    assert worker.telemetry.counts[LogEvent.TRANSPORT_NOT_READY] == 1
    (record,) = logged(caplog)
    shown = record.__dict__
    assert (shown["message_id"], shown["topic"], shown["sender"]) == (message_id, "greet", "pgoutbox@localhost")
    assert shown["recipients"] == ["ann@example.com", "eve@example.com"]
    assert shown["headers"]["Subject"] == "Grüße"
    assert shown["headers"]["To"] == "ann@example.com"
    assert shown["headers"]["X-Reset-Token"] == "token=(redacted)"
    assert shown["attachments"] == ["a.pdf"]
    assert shown["text"] == "Hello Ann,\n\nhttps://club.test/reset?token=(redacted)&page=2\n"
    assert "c4n4ry" not in str(shown)
    (file,) = directory.iterdir()
    assert shown["file"] == str(file)
    assert file.stat().st_mode & 0o777 == 0o600
    body = parsed(file.read_bytes()).get_body(("plain",))
    assert body is not None
    assert LINK in body.get_content()


async def test_a_raw_email_is_logged_too(caplog: pytest.LogCaptureFixture) -> None:
    raw = RawEmail(data=b"Subject: x\r\n\r\ntoken=c4n4ry \xff\r\n", to="ann@example.com", envelope_sender="")
    with caplog.at_level(logging.INFO):
        assert await LogTransport(settings_with(mail_transport="log")).send(outgoing(), raw) == Sent()
    (record,) = logged(caplog)
    assert record.__dict__["text"] == "Subject: x\r\n\r\ntoken=(redacted)\r\n"
    assert record.__dict__["sender"] == ""


async def test_a_long_text_is_truncated_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    email = Email(to="ann@example.com", subject="Hello", html="<p>" + "x" * 100_000)
    with caplog.at_level(logging.INFO):
        await LogTransport(settings_with(mail_transport="log")).send(outgoing(), email)
    (record,) = logged(caplog)
    assert record.__dict__["text"] == "<p>" + "x" * 9_997


async def test_an_email_that_a_server_would_not_get_is_refused(tmp_path: Path) -> None:
    transport = LogTransport(settings_with(mail_transport="log"))
    bad = Email(to="ann@example.com", subject="x\r\nBcc: eve@example.com", text="Hi")
    assert error_of(await transport.send(outgoing(), bad), Permanent) == "email.subject: contains CR, LF or NUL"
    occupied = tmp_path / "file"
    occupied.write_text("")
    full = LogTransport(settings_with(mail_transport="log", mail_directory=str(occupied)))
    error = error_of(await full.send(outgoing(), EMAIL), Unavailable)
    assert error.startswith("PGOUTBOX_MAIL_DIRECTORY: ")


async def test_a_redirect_applies_to_logged_emails(caplog: pytest.LogCaptureFixture) -> None:
    settings = settings_with(mail_transport="log", redirect_to="tester@example.org")
    transport = LogTransport(settings)
    with caplog.at_level(logging.INFO):
        assert await transport.send(outgoing(), EMAIL) == Sent()
    (record,) = logged(caplog)
    assert record.__dict__["recipients"] == ["tester@example.org"]


async def test_an_exempt_topic_is_logged_with_its_real_recipients(caplog: pytest.LogCaptureFixture) -> None:
    settings = settings_with(mail_transport="log", redirect_to="tester@example.org", redirect_exempt_topics="wel*")
    with caplog.at_level(logging.INFO):
        assert await LogTransport(settings).send(outgoing(topic="welcome"), EMAIL) == Sent()
        assert await LogTransport(settings).send(outgoing(topic="bye"), EMAIL) == Sent()
    exempt, other = (record.__dict__["recipients"] for record in logged(caplog))
    assert (other, other == exempt) == (["tester@example.org"], False)


async def test_no_email_reaches_the_applications_own_transport(dsn: str, db: psycopg.Connection) -> None:
    message_id = enqueue(db, destination="mailto:ann@example.com")
    provider = Provider()
    outbox = outbox_for(dsn, EMAIL, provider)
    await Worker(outbox).run_once()
    assert (row_of(db, message_id).state, provider.sent) == ("sent", [])
    assert complete(outbox.transports, outbox.settings)["sms"] is provider


async def test_without_the_setting_nothing_is_logged(dsn: str, db: psycopg.Connection) -> None:
    enqueue(db, destination="mailto:ann@example.com")
    provider = Provider()
    await Worker(outbox_for(dsn, EMAIL, provider, mail_transport="smtp")).run_once()
    assert provider.sent == [EMAIL]
    assert isinstance(complete({}, settings_with(smtp_host="mx.test"))["mailto"], SmtpTransport)


@pytest.mark.parametrize(
    ("given", "error"),
    [
        (
            {"mail_transport": "log", "smtp_host": "mx.test"},
            "PGOUTBOX_MAIL_TRANSPORT=log sends no e-mail, but PGOUTBOX_SMTP_HOST is set: unset one of them",
        ),
        (
            {"mail_directory": "/tmp"},
            "PGOUTBOX_MAIL_DIRECTORY is set, and only PGOUTBOX_MAIL_TRANSPORT=log writes there",
        ),
        ({"mail_transport": "file"}, "PGOUTBOX_MAIL_TRANSPORT='file': input should be 'smtp' or 'log'"),
    ],
)
def test_settings_of_production_refuse_the_log(given: dict[str, object], error: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        settings_with(**given)
    assert str(caught.value) == error


def test_the_worker_and_the_doctor_name_the_setting() -> None:
    settings = settings_with(dsn="host=127.0.0.1 port=1", connect_timeout_seconds=1, mail_transport="log")
    reason = "is log: e-mails are only logged, and their messages end sent"
    assert list(lacks_of(settings, ["mailto"], {})) == [Lack("PGOUTBOX_MAIL_TRANSPORT", reason)]
    (finding,) = (finding for finding in examine(settings, None) if finding.check == "smtp")
    assert (finding.level, finding.what) == (Level.WARNING, "PGOUTBOX_MAIL_TRANSPORT=log")


@pytest.mark.slow
def test_the_pytest_plugin_captures_emails_as_without_the_setting(
    dsn: str, db: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGOUTBOX_MAIL_TRANSPORT", "log")
    enqueue(db)
    driver = OutboxDriver(outbox_for(dsn, EMAIL), dsn)
    driver.run_pass()
    assert [delivery.content for delivery in driver.deliveries] == [EMAIL]
