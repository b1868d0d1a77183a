"""Tests the notification transport with a real HTTP server: deliveries, refusals, and secrets."""

from __future__ import annotations

import json
import logging
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import pytest

from pgoutbox import Context, Email, Message, Notification, Outbox
from pgoutbox.errors import ConfigurationError
from pgoutbox.message import Permanent, Sent, Snooze, Transient, Unavailable
from pgoutbox.settings import Settings, load_settings
from pgoutbox.transports.apprise import AppriseTransport
from pgoutbox.worker import Worker
from tests.support import outbox_actions
from tests.support.outbox_actions import attempts_of, enqueue, row_of
from tests.support.sends import closed_gate, closing, error_of, outgoing

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    import psycopg

pytestmark = pytest.mark.slow

HOST = "127.0.0.1"
BACKUP = Notification("Backup", "Done.", kind="success")


@dataclass
class Receiver:
    """A service that records requests and answers with `status`."""

    port: int = 0
    status: int = 200
    received: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def url(self, path: str = "hook") -> str:
        return f"json://canary-user:canary-password@{HOST}:{self.port}/canary-token/{path}?-key=canary-value"


@contextmanager
def receiving() -> Iterator[Receiver]:
    receiver = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            receiver.received.append((self.path, json.loads(body)))
            self.send_response(receiver.status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name is the library's
            """Suppress the log."""

    with ThreadingHTTPServer((HOST, 0), Handler) as server:
        receiver.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield receiver
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as receiver:
        yield receiver


@pytest.fixture
async def open_transport() -> AsyncIterator[Callable[..., AppriseTransport]]:
    """Create transports for names and URLs, and close them."""

    def make(**urls: str) -> AppriseTransport:
        return AppriseTransport(settings_with(urls))

    async with closing(make) as make_one:
        yield make_one


def settings_with(urls: object) -> Settings:
    return load_settings(apprise_urls=urls if isinstance(urls, str) else json.dumps(urls))


async def test_a_notification_arrives_at_the_service_named_by_the_destination(
    open_transport: Callable[..., AppriseTransport], receiver: Receiver
) -> None:
    transport = open_transport(ops=receiver.url("ops"), sales=receiver.url("sales"))
    assert await transport.send(outgoing(destination="apprise:ops"), BACKUP) == Sent()
    assert await transport.send(outgoing(destination="apprise:sales"), Notification("", "Grüße\n<b>")) == Sent()
    (ops_path, ops), (sales_path, sales) = receiver.received
    assert ops_path.startswith("/canary-token/ops?")
    assert (ops["title"], ops["message"], ops["type"]) == ("Backup", "Done.", "success")
    assert sales_path.startswith("/canary-token/sales?")
    assert (sales["title"], sales["message"], sales["type"]) == ("", "Grüße\n<b>", "info")


async def test_nothing_is_handed_over_if_the_gate_is_closed_in_its_turn(
    open_transport: Callable[..., AppriseTransport], receiver: Receiver
) -> None:
    transport = open_transport(ops=receiver.url("ops"))
    with closed_gate() as asked:
        assert isinstance(await transport.send(outgoing(destination="apprise:ops"), BACKUP), Snooze)
    assert (asked, receiver.received) == ([None], [])


async def test_a_refusal_is_transient_and_contains_the_log_of_apprise(
    open_transport: Callable[..., AppriseTransport], receiver: Receiver
) -> None:
    transport = open_transport(ops=receiver.url())
    receiver.status = 500
    error = error_of(await transport.send(outgoing(destination="apprise:ops"), BACKUP), Transient)
    assert error.startswith("apprise:ops: Failed to send JSON POST notification")
    assert "500" in error
    receiver.status = 200
    assert await transport.send(outgoing(destination="apprise:ops"), BACKUP) == Sent()


async def test_an_unreachable_service_is_transient(
    open_transport: Callable[..., AppriseTransport],
) -> None:
    with socket.socket() as deaf:
        deaf.bind((HOST, 0))  # The port is reserved, and nothing listens on it.
        transport = open_transport(ops=f"json://{HOST}:{deaf.getsockname()[1]}/x")
        error = error_of(await transport.send(outgoing(destination="apprise:ops"), BACKUP), Transient)
    assert error == "apprise:ops: A Connection error occurred sending JSON notification to (hidden)."


async def test_no_secret_and_no_text_is_in_a_log_or_an_error(
    open_transport: Callable[..., AppriseTransport], receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    transport = open_transport(ops=receiver.url(), gone="json://canary-user:canary-password@canary-host.invalid")
    outcomes = []
    for status in (200, 404, 500):
        receiver.status = status
        outcomes.append(await transport.send(outgoing(destination="apprise:ops"), Notification("canary", "canary")))
    outcomes.append(await transport.send(outgoing(destination="apprise:gone"), Notification("canary", "canary")))
    assert [type(outcome) for outcome in outcomes] == [Sent, Transient, Transient, Transient]
    assert "canary" not in caplog.text
    assert "canary" not in repr(outcomes)
    assert "canary" not in repr(Notification("canary", "canary"))
    assert len(receiver.received) == 3


async def test_other_log_records_of_apprise_are_not_changed(
    open_transport: Callable[..., AppriseTransport], receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    transport = open_transport(ops=receiver.url())
    await transport.send(outgoing(destination="apprise:ops"), BACKUP)
    logging.getLogger("apprise").warning("of the application")
    assert "of the application" in caplog.text
    await transport.aclose()
    assert logging.getLogger("apprise").filters == []


@pytest.mark.parametrize(
    ("urls", "error"),
    [
        ("json://canary-token", "must be a JSON object of names and URLs"),
        ('["json://canary-token"]', "must be a JSON object of names and URLs"),
        ('{"Ops Team": "json://canary-token"}', "'Ops Team': give names of a-z, 0-9, underscore, dot and hyphen"),
        ('{"ops": ["json://canary-token"]}', "'ops': must be one URL, as text"),
        ('{"ops": "no-such-service://canary-token"}', "'ops': "),
        ('{"ops": "slack://canary-token"}', "'ops': "),
        ('{"ops": ""}', "'ops': "),
    ],
)
def test_an_unusable_url_is_refused_by_its_name_at_the_start(urls: str, error: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        AppriseTransport(settings_with(urls))
    assert str(caught.value).startswith(f"PGOUTBOX_APPRISE_URLS: {error}")
    assert "canary" not in str(caught.value)
    assert logging.getLogger("apprise").filters == []


def test_the_setting_is_a_secret() -> None:
    assert "canary" not in repr(settings_with({"ops": "json://canary-token"}))


@pytest.mark.parametrize("destination", [None, "apprise:", "apprise:Ops", "apprise:json://canary-token"])
async def test_a_destination_that_is_not_a_name_is_permanent(
    open_transport: Callable[..., AppriseTransport], receiver: Receiver, destination: str | None
) -> None:
    outcome = await open_transport(ops=receiver.url()).send(outgoing(destination=destination), BACKUP)
    error = error_of(outcome, Permanent)
    assert error == "destination: must be apprise:NAME, with a NAME of PGOUTBOX_APPRISE_URLS"


async def test_a_name_missing_in_the_setting_costs_no_attempt(
    open_transport: Callable[..., AppriseTransport], receiver: Receiver
) -> None:
    transport = open_transport(ops=receiver.url(), sales=receiver.url())
    error = error_of(await transport.send(outgoing(destination="apprise:opps"), BACKUP), Unavailable)
    assert error == "destination: PGOUTBOX_APPRISE_URLS has no 'opps' (it has: ops, sales)"


@pytest.mark.parametrize(
    ("status", "kind"), [(401, Unavailable), (403, Unavailable), (404, Transient), (500, Transient)]
)
async def test_refused_credentials_of_a_service_cost_no_attempt(
    open_transport: Callable[..., AppriseTransport],
    receiver: Receiver,
    status: int,
    kind: type[Transient | Unavailable],
) -> None:
    receiver.status = status
    outcome = await open_transport(ops=receiver.url()).send(outgoing(destination="apprise:ops"), BACKUP)
    assert f"error={status}" in error_of(outcome, kind)


async def test_each_service_has_its_own_breaker(dsn: str, db: psycopg.Connection, receiver: Receiver) -> None:
    urls = json.dumps({"ops": receiver.url()})
    outbox = Outbox(outbox_actions.settings_for(dsn, apprise_urls=urls))

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> Notification:
        return BACKUP

    misspelt, sound = enqueue(db, destination="apprise:opps"), enqueue(db, destination="apprise:ops")
    await Worker(outbox).run_once()
    row = row_of(db, misspelt)
    assert (row.state, row.max_attempts - row.attempt_count) == ("pending", 11)
    assert row_of(db, sound).state == "sent"
    assert db.execute("SELECT key FROM pgoutbox.breaker").fetchall() == [("apprise:opps",)]


WRONG_KIND = Notification("a", "b", kind="bad")  # type: ignore[arg-type] # the mistake under test
WRONG_FORMAT = Notification("a", "b", format="rtf")  # type: ignore[arg-type] # the mistake under test


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (Notification("a\r\nb", "Hi"), "notification.title: contains CR, LF or NUL"),
        (Notification("a", " "), "notification.body: is empty"),
        (Notification("a", "\ud800"), "notification.body: contains the character U+D800"),
        (Notification("a", b"x"), "notification.body: must be text, not bytes"),  # type: ignore[arg-type] # the mistake
        (WRONG_KIND, "notification.kind: 'bad': must be one of info, success, warning, failure"),
        (WRONG_FORMAT, "notification.format: 'rtf': must be one of text, markdown, html"),
        (Email(subject="a", text="b"), "content: the notification transport sends a Notification, not Email"),
    ],
)
async def test_an_invalid_notification_is_permanent_and_is_not_sent(
    open_transport: Callable[..., AppriseTransport], receiver: Receiver, content: Notification, error: str
) -> None:
    outcome = await open_transport(ops=receiver.url()).send(outgoing(destination="apprise:ops"), content)
    assert error_of(outcome, Permanent) == error
    assert receiver.received == []


async def test_a_worker_sends_the_rendered_notification_and_stores_only_the_name(
    dsn: str, db: psycopg.Connection, receiver: Receiver
) -> None:
    urls = json.dumps({"ops": receiver.url()})
    outbox = Outbox(outbox_actions.settings_for(dsn, apprise_urls=urls))

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> Notification:
        return BACKUP

    message_id = enqueue(db, destination="apprise:ops")
    await Worker(outbox).run_once()
    assert row_of(db, message_id).state == "sent"
    assert len(receiver.received) == 1
    (row,) = db.execute("SELECT m::text FROM pgoutbox.message AS m").fetchone() or ("",)
    assert "apprise:ops" in row
    assert "canary" not in row


async def test_a_worker_names_the_missing_setting(outbox: Outbox, db: psycopg.Connection) -> None:
    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> Notification:
        return BACKUP

    message_id = enqueue(db, destination="apprise:ops")
    await Worker(outbox).run_once()
    row = row_of(db, message_id)
    assert (row.state, row.max_attempts - row.attempt_count) == ("pending", 11)
    ((_, _, error),) = attempts_of(db, message_id)
    assert (error or "").endswith("; set PGOUTBOX_APPRISE_URLS")


def test_a_missing_apprise_is_reported_with_its_install_command() -> None:
    program = (
        "import sys; sys.modules['apprise'] = None\n"
        "from pgoutbox import MissingExtraError, Notification\n"
        "from pgoutbox.settings import load_settings\n"
        "from pgoutbox.transports.apprise import AppriseTransport\n"
        "Notification('Backup', 'Done.')\n"
        "try: AppriseTransport(load_settings())\n"
        "except MissingExtraError as error: print(error)\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout == (
        "the notification transport needs an optional dependency: pip install 'pgoutbox[apprise]'\n"
    )
