"""Tests the webhook transport with real servers: requests, responses, and refused destinations."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import socket
import ssl
import threading
from functools import partial
from typing import TYPE_CHECKING, Literal

import pytest
import standardwebhooks
import trustme

from pgoutbox import Outbox, RetryPolicy, Webhook
from pgoutbox.message import Permanent, SendFailure, Sent, Snooze, Transient, Unavailable
from pgoutbox.observability.events import LogEvent
from pgoutbox.settings import Settings
from pgoutbox.transports import WebhookTransport
from pgoutbox.transports.webhook.connection import MAX_ANSWER_BYTES, Connection
from pgoutbox.webhooks import verify
from pgoutbox.worker import Worker
from tests.support.dialogues import HOST, listening
from tests.support.outbox_actions import PATIENCE_SECONDS, Row, attempts_of, enqueue, make_due, row_of, rows_of, running
from tests.support.sends import closed_gate, closing, error_of, gate, outgoing
from tests.support.settings import settings_with
from tests.support.waiting import turn, until
from tests.support.webhook_server import Misbehaviour, answer, webhook_server

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from pathlib import Path

    import psycopg

    from pgoutbox.handlers import Context
    from pgoutbox.message import Message

    Open = Callable[..., WebhookTransport]

HANG, DROP, ENDLESS = Misbehaviour.HANG, Misbehaviour.DROP, Misbehaviour.ENDLESS
OLD, NEW = (f"whsec_{base64.b64encode(letter * 32).decode()}" for letter in (b"o", b"n"))
CANARY = "c4n4ry-s3cret"
HOOK = Webhook(body={"type": "order.paid"})
TIMESTAMP = 1_700_000_000
SHORT_SECONDS = 0.5  # A deadline that a test waits for.


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def ca_file(authority: trustme.CA, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ca") / "ca.pem"
    authority.cert_pem.write_to_path(path)
    return path


def server_context(authority: trustme.CA, *names: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(*names).configure_cert(context)
    return context


@pytest.fixture(scope="module")
def tls(authority: trustme.CA) -> ssl.SSLContext:
    """Create a server's certificate for the address and the name that the tests connect to."""
    return server_context(authority, HOST, "127.0.0.2", "hooks.test")


def settings_for(port: int, **overrides: object) -> Settings:
    """Return settings that allow webhooks to one local port."""
    given: dict[str, object] = {
        "webhook_secrets": f"{NEW} {OLD}",
        "webhook_ports": f"443,{port}",
        "webhook_allowed_networks": "127.0.0.0/8",
        "webhook_allow_http": True,
        "webhook_timeout_seconds": 10,
    }
    return settings_with(**(given | overrides))


@pytest.fixture
async def open_transport() -> AsyncIterator[Open]:
    """Create transports that may reach a local port, and close them."""

    def make(port: int, **overrides: object) -> WebhookTransport:
        return WebhookTransport(settings_for(port, **overrides), clock=lambda: TIMESTAMP)

    async with closing(make) as make_one:
        yield make_one


# --- deliveries -------------------------------------------------------------------------------------------------------


async def test_a_webhook_arrives_signed_over_tls(open_transport: Open, tls: ssl.SSLContext, ca_file: Path) -> None:
    async with webhook_server(tls=tls) as server:
        transport = open_transport(server.port, webhook_ca_file=str(ca_file), webhook_allow_http=False)
        message = outgoing(destination=server.url("/hook?a=1"))
        assert await transport.send(message, Webhook(body={"n": "ü"}, headers={"X-Shop": "7"})) == Sent()
    (received,) = server.received
    assert (received.method, received.target, received.body) == ("POST", "/hook?a=1", b'{"n":"\xc3\xbc"}')
    assert received.headers["host"] == f"{HOST}:{server.port}"
    assert received.headers["x-shop"] == "7"
    assert received.headers["webhook-id"] == received.headers["idempotency-key"] == message.idempotency_key
    assert received.headers["webhook-timestamp"] == str(TIMESTAMP)
    for secret in (OLD, NEW):
        assert verify(received.body, received.headers, secret, now=TIMESTAMP) == message.idempotency_key


async def test_the_cas_of_the_system_are_read_for_the_first_connection_with_tls(
    open_transport: Open, tls: ssl.SSLContext, ca_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with webhook_server(tls=tls) as server:
        transport = open_transport(server.port)
        monkeypatch.setenv("SSL_CERT_FILE", str(ca_file))
        messages = [outgoing(destination=server.url()) for _ in range(3)]
        assert await asyncio.gather(*(transport.send(message, HOOK) for message in messages)) == [Sent()] * 3


async def test_the_reference_library_verifies_the_signature() -> None:
    async with webhook_server() as server:
        transport = WebhookTransport(settings_for(server.port))
        assert await transport.send(outgoing(destination=server.url(scheme="http")), HOOK) == Sent()
        await transport.aclose()
    (received,) = server.received
    for secret in (OLD, NEW):
        believed = standardwebhooks.Webhook(secret).verify(received.body, received.headers)
        assert believed == {"type": "order.paid"}


async def test_nothing_is_handed_over_if_the_gate_is_closed_after_connecting(open_transport: Open) -> None:
    async with webhook_server() as server:
        transport = open_transport(server.port)
        with closed_gate() as asked, pytest.raises(Snooze):
            await transport.send(outgoing(destination=server.url(scheme="http")), HOOK)
        assert (asked, server.connection_count) == ([None], 1)
    assert server.received == []


async def test_nothing_is_handed_over_if_its_time_is_up_at_the_gate(open_transport: Open) -> None:
    loop = asyncio.get_running_loop()
    async with webhook_server() as server, asyncio.timeout(PATIENCE_SECONDS):
        transport = open_transport(server.port, webhook_timeout_seconds=SHORT_SECONDS)
        opens_at = loop.time() + 2 * SHORT_SECONDS
        with gate(lambda: until(lambda: loop.time() >= opens_at)):
            outcome = await transport.send(outgoing(destination=server.url(scheme="http")), HOOK)
        assert error_of(outcome, Transient).startswith("connect: no connection within")
    assert server.received == []


async def test_a_closed_gate_leaves_no_connection_open(open_transport: Open) -> None:
    async with webhook_server() as server, asyncio.timeout(PATIENCE_SECONDS):
        transport = open_transport(server.port)
        with closed_gate(), pytest.raises(Snooze):
            await transport.send(outgoing(destination=server.url(scheme="http")), HOOK)
        await server.was_left.wait()


async def test_the_request_contains_only_the_given_values(open_transport: Open) -> None:
    async with webhook_server(answer(200, Set_Cookie="a=b")) as server:
        transport = open_transport(server.port)
        for _ in range(2):
            assert await transport.send(outgoing(destination=server.url(scheme="http")), HOOK) == Sent()
    names = [line.partition(":")[0] for line in server.received[1].header_lines]
    assert sorted(names) == [
        "Accept-Encoding", "Content-Length", "Content-Type", "Host", "Idempotency-Key", "User-Agent",
        "webhook-id", "webhook-signature", "webhook-timestamp",
    ]  # fmt: skip


async def test_proxies_of_the_environment_are_ignored(open_transport: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    async with webhook_server() as server, webhook_server() as proxy:
        for variable in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
            monkeypatch.setenv(variable, f"http://{HOST}:{proxy.port}")
        destination = server.url(scheme="http")
        assert await open_transport(server.port).send(outgoing(destination=destination), HOOK) == Sent()
    assert proxy.connection_count == 0


async def test_a_connection_is_reused_only_for_the_same_host_and_port(open_transport: Open) -> None:
    async with webhook_server() as server, webhook_server() as other:
        transport = open_transport(server.port, webhook_ports=f"{server.port},{other.port}")
        for where in (server, server, other, server, other):
            assert await transport.send(outgoing(destination=where.url(scheme="http")), HOOK) == Sent()
    assert (server.connection_count, other.connection_count) == (1, 1)


async def test_a_connection_closed_by_the_server_is_replaced(open_transport: Open) -> None:
    async with webhook_server(answer(200, Connection="close")) as server:
        transport = open_transport(server.port)
        for _ in range(3):
            assert await transport.send(outgoing(destination=server.url(scheme="http")), HOOK) == Sent()
    assert server.connection_count == 3


@pytest.mark.parametrize("end", ["closed", "reset", "an answer that nobody asked for"])
@pytest.mark.parametrize("moment", ["before the send", "at the gate", "at the gate, unnoticed"])
async def test_a_dead_idle_connection_costs_no_attempt(open_transport: Open, end: str, moment: str) -> None:
    async def end_idle(*, turns: int) -> None:
        if server.connection_count == 1:
            if end == "closed" or end == "reset":
                server.close_idle(reset=end == "reset")
            else:
                server.say_to_idle(answer(408))
            await turn(turns)  # The first turn closes the server's socket, and the client notices it in a later one.

    async with webhook_server() as server, asyncio.timeout(PATIENCE_SECONDS):
        transport = open_transport(server.port)
        message = outgoing(destination=server.url(scheme="http"))
        assert await transport.send(message, HOOK) == Sent()
        if moment == "before the send":
            await end_idle(turns=9)
            assert await transport.send(message, HOOK) == Sent()
        else:
            with gate(partial(end_idle, turns=1 if "unnoticed" in moment else 9)):
                assert await transport.send(message, HOOK) == Sent()
    assert [len(server.received), server.connection_count] == [2, 2]


async def test_a_new_connection_that_ends_at_the_gate_was_not_used(open_transport: Open) -> None:
    async def until_closed() -> None:
        await server.was_left.wait()
        await turn(9)

    async with webhook_server(Misbehaviour.REFUSE) as server, asyncio.timeout(PATIENCE_SECONDS):
        with gate(until_closed):
            outcome = await open_transport(server.port).send(outgoing(destination=server.url(scheme="http")), HOOK)
    assert error_of(outcome, Transient) == "connect: the connection was closed"
    assert isinstance(outcome, SendFailure)
    assert not outcome.unknown


@pytest.mark.parametrize("method", ["POST", "PUT"])
async def test_an_undetected_dead_idle_connection_leaves_the_outcome_unknown(
    open_transport: Open, method: Literal["POST", "PUT"]
) -> None:
    async with webhook_server(answer(200), DROP) as server:
        transport = open_transport(server.port)
        message = outgoing(destination=server.url(scheme="http"))
        assert await transport.send(message, HOOK) == Sent()
        outcome = await transport.send(message, Webhook(body=1, method=method))
    assert error_of(outcome, Transient).startswith("outcome unknown: the connection was ")
    assert isinstance(outcome, SendFailure)
    assert outcome.unknown
    assert [len(server.received), server.connection_count] == [2, 1]


async def test_a_second_answer_to_one_request_is_not_an_answer_to_the_next(open_transport: Open) -> None:
    async with webhook_server(answer(200) + answer(410), answer(200)) as server:
        transport = open_transport(server.port)
        for _ in range(2):
            assert await transport.send(outgoing(destination=server.url(scheme="http")), HOOK) == Sent()
    assert server.connection_count == 2


async def test_a_second_answer_right_after_the_first_ends_the_connection() -> None:
    async with webhook_server(HANG) as server:
        loop = asyncio.get_running_loop()
        origin = ("http", HOST, server.port)
        _, connection = await loop.create_connection(lambda: Connection(origin), HOST, server.port)
        first = connection.send(b"POST / HTTP/1.1\r\nHost: a\r\n\r\n", until=loop.time() + PATIENCE_SECONDS)
        for data in (answer(200), answer(200)):  # Before the sender goes on.
            connection.data_received(data)
        await first.ended
        assert first.status == 200
        assert not connection.end_exchange()


async def test_answers_of_all_kinds_follow_each_other_on_one_connection(open_transport: Open) -> None:
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n"
    early = b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n"
    kinds = [answer(200, b"ok"), chunked, answer(204), answer(503), early + answer(200), answer(201)]
    async with webhook_server(*kinds) as server:
        transport = open_transport(server.port)
        outcomes = [await transport.send(outgoing(destination=server.url(scheme="http")), HOOK) for _ in kinds]
    assert [type(outcome) for outcome in outcomes] == [Sent, Sent, Sent, SendFailure, Sent, Sent]
    assert server.connection_count == 1


async def test_a_connection_with_unsent_bytes_is_not_reused(open_transport: Open) -> None:
    was_left = asyncio.Event()

    async def refuse_early(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer(413))
        with contextlib.suppress(ConnectionError):
            while await reader.read(65_536):
                pass
        was_left.set()
        writer.close()

    async with listening(refuse_early) as port, asyncio.timeout(PATIENCE_SECONDS):
        hook = Webhook(body=b"x" * 20_000_000)
        outcome = await open_transport(port).send(outgoing(destination=f"http://{HOST}:{port}"), hook)
        assert error_of(outcome, Permanent) == "413 Request Entity Too Large"
        await was_left.wait()


async def test_the_number_of_idle_connections_is_limited_by_the_setting(open_transport: Open) -> None:
    async with webhook_server() as server, webhook_server() as other, asyncio.timeout(PATIENCE_SECONDS):
        transport = open_transport(server.port, webhook_ports=f"{server.port},{other.port}", webhook_connections=1)
        for where in (server, other):
            assert await transport.send(outgoing(destination=where.url(scheme="http")), HOOK) == Sent()
        await server.was_left.wait()
        assert not other.was_left.is_set()


async def test_a_connection_that_was_idle_for_long_is_replaced(
    open_transport: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pgoutbox.transports.webhook.transport.IDLE_SECONDS", -1)  # Every idle connection is old.
    async with webhook_server() as server, asyncio.timeout(PATIENCE_SECONDS):
        transport = open_transport(server.port)
        for _ in range(2):
            assert await transport.send(outgoing(destination=server.url(scheme="http")), HOOK) == Sent()
        await server.was_left.wait()
    assert server.connection_count == 2


async def test_the_number_of_concurrent_requests_is_limited_by_the_setting(open_transport: Open) -> None:
    async with webhook_server() as server:
        transport = open_transport(server.port, webhook_connections=3)
        message = outgoing(destination=server.url(scheme="http"))
        assert await asyncio.gather(*(transport.send(message, HOOK) for _ in range(30))) == [Sent()] * 30
    assert server.connection_count == 3


# --- classification of responses --------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [200, 201, 202, 204, 299])
async def test_a_2xx_status_is_sent(open_transport: Open, status: int) -> None:
    async with webhook_server(answer(status)) as server:
        destination = server.url(scheme="http")
        assert await open_transport(server.port).send(outgoing(destination=destination), HOOK) == Sent()


async def test_a_204_with_a_body_is_sent(open_transport: Open) -> None:
    async with webhook_server(answer(204, b"x")) as server:
        destination = server.url(scheme="http")
        assert await open_transport(server.port).send(outgoing(destination=destination), HOOK) == Sent()


@pytest.mark.parametrize(
    ("status", "kind", "error"),
    [
        (301, Permanent, "301 Moved Permanently: redirects are not followed; change the destination"),
        (302, Permanent, "302 Found: redirects are not followed; change the destination"),
        (304, Permanent, "304 Not Modified: redirects are not followed; change the destination"),
        (307, Permanent, "307 Temporary Redirect: redirects are not followed; change the destination"),
        (400, Permanent, "400 Bad Request"),
        (401, Unavailable, "401 Unauthorized"),
        (403, Transient, "403 Forbidden"),
        (404, Permanent, "404 Not Found"),
        (408, Transient, "408 Request Timeout"),
        (410, Permanent, "410 Gone"),
        (425, Transient, "425 Too Early"),
        (429, Transient, "429 Too Many Requests"),
        (499, Permanent, "499"),
        (500, Transient, "500 Internal Server Error"),
        (501, Transient, "501 Not Implemented"),
        (503, Transient, "503 Service Unavailable"),
        (599, Transient, "599"),
        (600, Permanent, "600"),
    ],
)
async def test_a_response_is_classified_by_its_status_alone(
    open_transport: Open, status: int, kind: type[Transient | Permanent | Unavailable], error: str
) -> None:
    async with webhook_server(answer(status, CANARY.encode(), X_Canary=CANARY)) as server:
        destination = server.url(scheme="http")
        assert error_of(await open_transport(server.port).send(outgoing(destination=destination), HOOK), kind) == error


async def test_a_redirect_is_not_followed(open_transport: Open) -> None:
    async with (
        webhook_server() as secret,
        webhook_server(answer(301, Location=secret.url(scheme="http"))) as server,
    ):
        transport = open_transport(server.port, webhook_ports=f"{server.port},{secret.port}")
        assert isinstance(await transport.send(outgoing(destination=server.url(scheme="http")), HOOK), Permanent)
    assert secret.connection_count == 0


@pytest.mark.parametrize(
    ("status", "value", "seconds"),
    [
        (429, "120", 120.0),
        (503, "0", 0.0),
        (500, "99999999999", 3_600.0),
        (429, "Sun, 06 Nov 1994 08:51:37 GMT", 120.0),
        (503, "Sun, 06 Nov 1994 08:40:00 GMT", 0.0),
        (429, "soon", None),
        (410, "120", None),
    ],
)
async def test_retry_after_is_used_within_its_limit(
    open_transport: Open, status: int, value: str, seconds: float | None
) -> None:
    given = answer(status, Retry_After=value, Date="Sun, 06 Nov 1994 08:49:37 GMT")
    async with webhook_server(given) as server:
        transport = open_transport(server.port, webhook_retry_after_cap_seconds=3_600)
        outcome = await transport.send(outgoing(destination=server.url(scheme="http")), HOOK)
    assert getattr(outcome, "retry_after", None) == seconds


async def test_an_excerpt_is_quoted_if_the_settings_request_it(open_transport: Open) -> None:
    body = f"<b>no\x1b[31m\r\n such \u202eshop</b> {CANARY} \xff".encode("latin-1", "ignore") + b"x" * 1_000
    async with webhook_server(answer(400, body)) as server:
        transport = open_transport(server.port, webhook_error_body_chars=60)
        hook = Webhook(body=1, headers={"Authorization": f"Bearer {CANARY}"})
        error = error_of(await transport.send(outgoing(destination=server.url(scheme="http")), hook), Permanent)
    assert error == "400 Bad Request: <b>no [31m such shop</b> (hidden) \ufffd" + "x" * 24 + "…"


# --- failures ---------------------------------------------------------------------------------------------------------


async def test_a_refused_connection_is_transient(open_transport: Open) -> None:
    with socket.socket() as deaf:
        deaf.bind((HOST, 0))  # The port is reserved, and nothing listens on it.
        port = deaf.getsockname()[1]
        outcome = await open_transport(port).send(outgoing(destination=f"http://{HOST}:{port}"), HOOK)
    assert error_of(outcome, Transient).startswith("connect: ")


async def test_a_host_that_does_not_resolve_is_transient(open_transport: Open) -> None:
    outcome = await open_transport(443).send(outgoing(destination="https://no-such-host.invalid/"), HOOK)
    assert error_of(outcome, Transient).startswith("connect: ")


@pytest.mark.slow
async def test_an_endless_handshake_is_transient_and_its_connection_closed(open_transport: Open) -> None:
    was_left = asyncio.Event()

    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        was_left.set()
        writer.close()

    listener = await asyncio.start_server(say_nothing, HOST, 0)
    port = listener.sockets[0].getsockname()[1]
    transport = open_transport(port, webhook_connect_timeout_seconds=SHORT_SECONDS, webhook_timeout_seconds=600)
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            outcome = await transport.send(outgoing(destination=f"https://{HOST}:{port}"), HOOK)
            await was_left.wait()
    finally:
        listener.close()
    assert error_of(outcome, Transient) == "connect: no connection within 0.5 s"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("behaviour", "error"),
    [
        (HANG, "outcome unknown: no answer within 0.5 s"),
        (Misbehaviour.DRIP_HEAD, "outcome unknown: no answer within 0.5 s"),
        (DROP, "outcome unknown: the connection was "),
        (b"SSH-2.0-" + CANARY.encode() + b"\r\n\r\n", "outcome unknown: the connection was closed without an answer"),
        (b"HTTP/1.1 101 Switching Protocols\r\n\r\n", "outcome unknown: the connection was closed without an answer"),
        (b"HTTP/1.1 200 OK\r\n" + b"X-A: b\r\n" * 20_000, "outcome unknown: the connection was closed without an "),
    ],
)
async def test_an_exchange_aborted_after_the_request_has_an_unknown_outcome(
    open_transport: Open, behaviour: bytes | Misbehaviour, error: str
) -> None:
    async with webhook_server(behaviour, answer(200)) as server, asyncio.timeout(PATIENCE_SECONDS):
        transport = open_transport(server.port, webhook_timeout_seconds=SHORT_SECONDS, webhook_connections=1)
        message = outgoing(destination=server.url(scheme="http"))
        outcome = await transport.send(message, HOOK)
        said = error_of(outcome, Transient)
        assert isinstance(outcome, SendFailure)
        assert outcome.unknown
        assert said.startswith(error)
        assert CANARY not in said
        await server.was_left.wait()
        assert len(server.received) == 1
        assert await transport.send(message, HOOK) == Sent()
    first, second = server.received
    assert first.headers["webhook-id"] == second.headers["webhook-id"]


@pytest.mark.parametrize("status_line", [b"HTTP/1.1 200 OK", b"HTTP/1.1 410 Gone"])
async def test_a_truncated_body_does_not_change_the_classification(open_transport: Open, status_line: bytes) -> None:
    cut = status_line + b"\r\nContent-Length: 1000\r\nConnection: close\r\n\r\nxxx"
    async with webhook_server(cut) as server:
        outcome = await open_transport(server.port).send(outgoing(destination=server.url(scheme="http")), HOOK)
    assert outcome == Sent() or error_of(outcome, Permanent) == "410 Gone"
    assert (outcome == Sent()) is (b"200" in status_line)


@pytest.mark.slow
@pytest.mark.parametrize("behaviour", [ENDLESS, Misbehaviour.DRIP_BODY])
async def test_a_long_body_is_read_only_in_part_and_its_connection_closed(
    open_transport: Open, behaviour: Misbehaviour
) -> None:
    async with webhook_server(behaviour) as server, asyncio.timeout(PATIENCE_SECONDS):
        # The limit also covers the connection, and must not end that here.
        transport = open_transport(server.port, webhook_timeout_seconds=6 * SHORT_SECONDS)
        assert await transport.send(outgoing(destination=server.url(scheme="http")), HOOK) == Sent()
        await server.was_left.wait()


@pytest.mark.slow
async def test_a_slow_body_does_not_hold_the_outcome_until_the_deadline(open_transport: Open) -> None:
    async with webhook_server(Misbehaviour.DRIP_BODY) as server, asyncio.timeout(PATIENCE_SECONDS):
        transport = open_transport(server.port, webhook_timeout_seconds=600)
        assert await transport.send(outgoing(destination=server.url(scheme="http")), HOOK) == Sent()
        await server.was_left.wait()


@pytest.mark.parametrize(("size", "connection_count"), [(MAX_ANSWER_BYTES, 1), (20 * MAX_ANSWER_BYTES, 2)])
async def test_a_body_within_the_limit_keeps_the_connection_usable(
    open_transport: Open, size: int, connection_count: int
) -> None:
    async with webhook_server(answer(500, b"x" * size)) as server:
        transport = open_transport(server.port)
        for _ in range(2):
            outcome = await transport.send(outgoing(destination=server.url(scheme="http")), HOOK)
            assert error_of(outcome, Transient) == "500 Internal Server Error"
    assert server.connection_count == connection_count


async def test_a_certificate_of_an_unknown_authority_is_refused(open_transport: Open, tls: ssl.SSLContext) -> None:
    async with webhook_server(tls=tls) as server:
        error = error_of(await open_transport(server.port).send(outgoing(destination=server.url()), HOOK), Transient)
    assert error.startswith("connect: ")
    assert "certificate verify failed" in error
    assert server.received == []


async def test_a_certificate_for_another_host_is_refused(
    open_transport: Open, authority: trustme.CA, ca_file: Path
) -> None:
    async with webhook_server(tls=server_context(authority, "other.example.org")) as server:
        transport = open_transport(server.port, webhook_ca_file=str(ca_file))
        error = error_of(await transport.send(outgoing(destination=server.url()), HOOK), Transient)
    assert "IP address mismatch" in error
    assert server.received == []


async def test_a_slow_name_server_delays_only_its_own_webhooks(open_transport: Open) -> None:
    loop = asyncio.get_running_loop()
    answered = threading.Event()
    # Every thread that the process shares for DNS queries waits for an answer.
    waiting = [loop.run_in_executor(None, answered.wait) for _ in range(64)]
    try:
        async with webhook_server() as server, asyncio.timeout(PATIENCE_SECONDS):
            destination = server.url(scheme="http", host="localhost")
            transport = open_transport(server.port, webhook_allowed_networks="127.0.0.0/8,::1")
            assert await transport.send(outgoing(destination=destination), HOOK) == Sent()
    finally:
        answered.set()
        await asyncio.gather(*waiting)


async def test_a_cancelled_send_closes_its_connection_and_frees_its_slot(open_transport: Open) -> None:
    async with webhook_server(HANG, answer(200)) as server, asyncio.timeout(PATIENCE_SECONDS):
        transport = open_transport(server.port, webhook_connections=1)
        message = outgoing(destination=server.url(scheme="http"))
        sending = asyncio.create_task(transport.send(message, HOOK))
        await server.is_silent.wait()
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        await server.was_left.wait()
        assert await transport.send(message, HOOK) == Sent()


async def test_a_send_cancelled_at_any_step_frees_its_slot(
    open_transport: Open, tls: ssl.SSLContext, ca_file: Path
) -> None:
    async with webhook_server(answer(200, Connection="close"), tls=tls) as server, asyncio.timeout(PATIENCE_SECONDS):
        transport = open_transport(server.port, webhook_connections=1, webhook_ca_file=str(ca_file))
        message = outgoing(destination=server.url())
        for step_count in range(40):
            sending = asyncio.create_task(transport.send(message, HOOK))
            for _ in range(step_count):
                await asyncio.sleep(0)  # Each turn of the loop advances it by one step.
            sending.cancel()
            await asyncio.wait([sending])
        assert await transport.send(message, HOOK) == Sent()


async def test_closing_closes_idle_connections(open_transport: Open) -> None:
    async with webhook_server() as server:
        transport = open_transport(server.port)
        assert await transport.send(outgoing(destination=server.url(scheme="http")), HOOK) == Sent()
        assert not server.was_left.is_set()
        await transport.aclose()
        await server.was_left.wait()


async def test_a_content_of_another_transport_is_permanent(open_transport: Open) -> None:
    class Email:
        scheme = "mailto"

    outcome = await open_transport(443).send(outgoing(), Email())
    assert error_of(outcome, Permanent) == "content: the webhook transport sends a Webhook, not Email"


async def test_an_invalid_webhook_is_refused_before_connecting(open_transport: Open) -> None:
    async with webhook_server() as server:
        transport = open_transport(server.port)
        message = outgoing(destination=server.url(scheme="http"))
        for headers in ({"X-A": "b\r\nHost: evil"}, {"Host": "evil"}, {"webhook-id": "1"}, {"X-A": "\u0085"}):
            assert "webhook.headers[" in error_of(
                await transport.send(message, Webhook(body=1, headers=headers)), Permanent
            )
    assert server.connection_count == 0


async def test_no_log_contains_a_secret(open_transport: Open, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with webhook_server(answer(500)) as server:
        hook = Webhook(body=CANARY, headers={"Authorization": CANARY}, secrets=[OLD])
        destination = server.url(f"/{CANARY}", scheme="http")
        assert isinstance(await open_transport(server.port).send(outgoing(destination=destination), hook), Transient)
    assert CANARY in server.received[0].target
    logged = [str(record.__dict__) + record.getMessage() for record in caplog.records]
    assert not [line for line in logged if CANARY in line or OLD in line]


# --- refused destinations ---------------------------------------------------------------------------------------------

Answers = dict[str, "Sequence[Sequence[str]]"]


@pytest.fixture
def look_ups(monkeypatch: pytest.MonkeyPatch) -> tuple[Answers, list[str]]:
    """The answers of a name server by host and in turn, with a record of the queries.

    This replaces `socket.getaddrinfo`, which every DNS query of the process uses: the test cannot change the name
    server of the machine.
    """
    answers: Answers = {}
    asked: list[str] = []
    real = socket.getaddrinfo

    def look_up(host: str, port: int, *rest: int, **options: int) -> Sequence[object]:
        if host not in answers:
            return real(host, port, *rest, **options)
        asked.append(host)
        turn = answers[host][min(asked.count(host), len(answers[host])) - 1]
        return [found for address in turn for found in real(address, port, *rest, **options)]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    return answers, asked


REFUSED = "is not in the public internet, nor in a network that PGOUTBOX_WEBHOOK_ALLOWED_NETWORKS allows"


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "localhost", "[::1]", "[::ffff:127.0.0.1]", "0.0.0.0", "[::]", "169.254.169.254",
     "[::ffff:169.254.169.254]", "10.0.0.1", "100.64.0.1", "224.0.0.1", "240.0.0.1", "[fd00:ec2::254]", "[fe80::1]",
     "[64:ff9b::7f00:1]", "[2002:7f00:1::]", "[2001:0:7f00:1::]"],
)  # fmt: skip
async def test_a_private_address_is_refused_when_connecting(
    open_transport: Open, host: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with webhook_server() as server:
        transport = open_transport(server.port, webhook_allowed_networks=None)
        destination = server.url(scheme="http", host=host)
        error = error_of(await transport.send(outgoing(destination=destination), HOOK), Permanent)
    assert error.endswith(REFUSED)
    assert server.connection_count == 0
    assert [getattr(record, "event", None) for record in caplog.records] == [LogEvent.WEBHOOK_ADDRESS_REFUSED]


async def test_a_name_with_one_private_address_is_refused(
    open_transport: Open, look_ups: tuple[Answers, list[str]]
) -> None:
    look_ups[0]["hooks.test"] = [["127.0.0.2", "127.0.0.1"]]
    async with webhook_server(host="127.0.0.2") as server:
        transport = open_transport(server.port, webhook_allowed_networks="127.0.0.2/32")
        destination = server.url(scheme="http", host="hooks.test")
        error = error_of(await transport.send(outgoing(destination=destination), HOOK), Permanent)
    assert error == f"hooks.test: {REFUSED}"
    assert "127.0.0.1" not in error
    assert server.connection_count == 0


async def test_a_name_is_resolved_once_for_each_connection(
    open_transport: Open, look_ups: tuple[Answers, list[str]]
) -> None:
    answers, asked = look_ups
    answers["hooks.test"] = [["127.0.0.2"], ["127.0.0.1"]]
    async with (
        webhook_server(answer(200, Connection="close"), host="127.0.0.2") as server,
        webhook_server(host="127.0.0.1", port=server.port) as secret,
    ):
        transport = open_transport(server.port, webhook_allowed_networks="127.0.0.2/32")
        message = outgoing(destination=server.url(scheme="http", host="hooks.test"))
        assert await transport.send(message, HOOK) == Sent()
        assert asked == ["hooks.test"]
        assert error_of(await transport.send(message, HOOK), Permanent) == f"hooks.test: {REFUSED}"
        assert asked == ["hooks.test"] * 2
    assert server.received[0].headers["host"] == f"hooks.test:{server.port}"
    assert (server.connection_count, secret.connection_count) == (1, 0)


async def test_the_certificate_is_checked_for_the_name_and_the_connection_uses_the_address(
    open_transport: Open, look_ups: tuple[Answers, list[str]], tls: ssl.SSLContext, ca_file: Path
) -> None:
    look_ups[0].update({"hooks.test": [["127.0.0.2"]], "other.test": [["127.0.0.2"]]})
    names: list[str | None] = []
    tls.sni_callback = lambda _socket, name, _context: names.append(name)
    async with webhook_server(tls=tls, host="127.0.0.2") as server:
        transport = open_transport(server.port, webhook_ca_file=str(ca_file))
        assert await transport.send(outgoing(destination=server.url(host="hooks.test")), HOOK) == Sent()
        other = await transport.send(outgoing(destination=server.url(host="other.test")), HOOK)
    assert names == ["hooks.test", "other.test"]
    assert "not valid for 'other.test'" in error_of(other, Transient)
    assert len(server.received) == 1


async def test_a_tls_session_is_resumed_only_with_the_same_host(
    open_transport: Open, look_ups: tuple[Answers, list[str]], tls: ssl.SSLContext, ca_file: Path
) -> None:
    look_ups[0].update({"hooks.test": [["127.0.0.2"]], "other.test": [["127.0.0.2"]]})
    async with webhook_server(answer(200, Connection="close"), tls=tls, host="127.0.0.2") as server:
        transport = open_transport(server.port, webhook_ca_file=str(ca_file))
        for resumed_count in range(3):
            assert await transport.send(outgoing(destination=server.url(host="hooks.test")), HOOK) == Sent()
            assert (server.connection_count, server.resumed_count) == (resumed_count + 1, resumed_count)
        # No session replaces the check of a certificate.
        for _ in range(2):
            refused = await transport.send(outgoing(destination=server.url(host="other.test")), HOOK)
            assert "not valid for 'other.test'" in error_of(refused, Transient)
    assert (len(server.received), server.resumed_count) == (3, 2)


async def test_after_an_unresponsive_address_the_next_one_is_tried(
    open_transport: Open, look_ups: tuple[Answers, list[str]]
) -> None:
    look_ups[0]["hooks.test"] = [["127.0.0.3", "127.0.0.2"]]
    async with webhook_server(host="127.0.0.2") as server:
        destination = server.url(scheme="http", host="hooks.test")
        assert await open_transport(server.port).send(outgoing(destination=destination), HOOK) == Sent()


@pytest.mark.slow
async def test_after_an_endless_handshake_the_next_address_is_tried(
    open_transport: Open, look_ups: tuple[Answers, list[str]], tls: ssl.SSLContext, ca_file: Path
) -> None:
    look_ups[0]["hooks.test"] = [["127.0.0.3", "127.0.0.2"]]
    async with (
        webhook_server(tls=tls, host="127.0.0.2") as server,
        webhook_server(HANG, host="127.0.0.3", port=server.port) as silent,
        asyncio.timeout(PATIENCE_SECONDS),
    ):
        transport = open_transport(
            server.port, webhook_ca_file=str(ca_file), webhook_connect_timeout_seconds=2 * SHORT_SECONDS
        )
        assert await transport.send(outgoing(destination=server.url(host="hooks.test")), HOOK) == Sent()
        await silent.was_left.wait()


@pytest.mark.slow
async def test_a_look_up_that_takes_too_long_is_transient(
    open_transport: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answered.wait(2 * PATIENCE_SECONDS))
    transport = open_transport(443, webhook_connect_timeout_seconds=SHORT_SECONDS, webhook_timeout_seconds=600)
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            outcome = await transport.send(outgoing(destination="https://hooks.test"), HOOK)
    finally:
        answered.set()
    assert error_of(outcome, Transient) == "connect: no connection within 0.5 s"


# --- a worker ---------------------------------------------------------------------------------------------------------

FEW = RetryPolicy(max_attempts=3, base=3_600, cap=3_600, jitter=0)


async def deliver(
    db: psycopg.Connection, settings: Settings, destination: str, *, hook: Webhook = HOOK, passes: int = 1
) -> list[Row]:
    """Enqueue a message, let workers try it with a minute between attempts, and return its row after each of them."""
    outbox = Outbox(settings)

    @outbox.handler("greet", retry=FEW)
    async def greet(message: Message, ctx: Context) -> Webhook:
        return hook

    message_id = enqueue(db, destination=destination, max_attempts=FEW.max_attempts)
    rows = []
    for minute in range(passes):
        transport = WebhookTransport(settings, clock=partial(float, TIMESTAMP + 60 * minute))
        await Worker(outbox, transports=dict.fromkeys(transport.schemes, transport)).run_once()
        rows.append(row_of(db, message_id))
        make_due(db, message_id)
    return rows


@pytest.mark.slow
async def test_a_retry_has_the_same_id_and_a_new_timestamp(dsn: str, db: psycopg.Connection) -> None:
    async with webhook_server(answer(503), DROP, answer(200)) as server:
        settings = settings_for(server.port, dsn=dsn)
        rows = await deliver(db, settings, server.url(scheme="http"), passes=3)
    assert [(row.state, row.attempt_count) for row in rows] == [("pending", 1), ("pending", 2), ("sent", 3)]
    assert rows[0].last_error == "503 Service Unavailable"
    assert (rows[1].last_error or "").startswith("outcome unknown: the connection was ")
    assert [outcome for _, outcome, _ in attempts_of(db, rows[0].id)] == ["retry", "retry"]
    assert [received.headers["webhook-timestamp"] for received in server.received] == [
        str(TIMESTAMP + seconds) for seconds in (0, 60, 120)
    ]
    ids = {
        verify(received.body, received.headers, OLD, now=TIMESTAMP + 60 * minute)
        for minute, received in enumerate(server.received)
    }
    assert len(ids) == 1
    assert len({received.headers["webhook-signature"] for received in server.received}) == 3


@pytest.mark.slow
@pytest.mark.parametrize("breaker_failures", [5, 1], ids=["alive", "the failure that opens the breaker"])
async def test_an_unknown_outcome_is_not_sent_again_if_the_topic_holds_it(
    dsn: str, db: psycopg.Connection, breaker_failures: int
) -> None:
    async with webhook_server(answer(200), DROP) as server:
        settings = settings_for(server.port, dsn=dsn, breaker_failures=breaker_failures, concurrency=1)
        outbox = Outbox(settings)

        @outbox.handler("greet", retry=FEW, on_unknown="hold")
        async def greet(message: Message, ctx: Context) -> Webhook:
            return HOOK

        ids = [enqueue(db, destination=server.url(scheme="http")) for _ in range(2)]
        await Worker(outbox).run_once()
    assert [row_of(db, message_id).state for message_id in ids] == ["sent", "failed"]
    assert (row_of(db, ids[1]).last_error or "").startswith("outcome unknown: the connection was ")
    assert len(server.received) == 2


async def test_a_webhook_that_certainly_did_not_arrive_is_retried(dsn: str, db: psycopg.Connection) -> None:
    with socket.create_server((HOST, 0)) as closed:
        port = closed.getsockname()[1]
    outbox = Outbox(settings_for(port, dsn=dsn))

    @outbox.handler("greet", retry=FEW, on_unknown="hold")
    async def greet(message: Message, ctx: Context) -> Webhook:
        return HOOK

    message_id = enqueue(db, destination=f"http://{HOST}:{port}/hook")
    await Worker(outbox).run_once()
    row = row_of(db, message_id)
    assert (row.state, (row.last_error or "").partition(":")[0]) == ("pending", "connect")


@pytest.mark.parametrize(
    ("reply", "is_outage", "scope"),
    [
        *((answer(status), True, "host") for status in (502, 503, 504)),
        (DROP, True, "host"),
        *((answer(status), True, "url") for status in (403, 500, 501, 599)),
        *((answer(status), False, "url") for status in (408, 425, 429)),
    ],
    ids=["502", "503", "504", "dropped", "403", "500", "501", "599", "408", "425", "429"],
)
async def test_outages_count_for_the_host_or_for_the_url(
    open_transport: Open, reply: object, is_outage: bool, scope: str
) -> None:
    async with webhook_server(reply) as server:  # type: ignore[arg-type] # one of the kinds above
        transport, message = open_transport(server.port), outgoing(destination=server.url(scheme="http"))
        outcome = await transport.send(message, HOOK)
    assert isinstance(outcome, SendFailure)
    url_key, *_ = transport.part_keys(message, HOOK)
    assert (outcome.outage, outcome.breaker) == (is_outage, url_key if scope == "url" else None)


async def test_a_dead_host_opens_its_breaker_and_messages_keep_their_attempts(dsn: str, db: psycopg.Connection) -> None:
    with socket.create_server((HOST, 0)) as closed:
        port = closed.getsockname()[1]
    settings = settings_for(port, dsn=dsn, breaker_failures=2, concurrency=1)
    outbox = Outbox(settings)

    @outbox.handler("greet", retry=FEW)
    async def greet(message: Message, ctx: Context) -> Webhook:
        return HOOK

    ids = [enqueue(db, destination=f"http://{HOST}:{port}/hook", max_attempts=3) for _ in range(10)]
    await Worker(outbox).run_once()
    assert db.execute("SELECT key FROM pgoutbox.breaker").fetchall() == [(f"http:{HOST}:{port}",)]
    left = [row.max_attempts - row.attempt_count for row in (row_of(db, message_id) for message_id in ids)]
    assert sorted(left) == [2] + [3] * 9


@pytest.mark.slow
async def test_retry_after_is_the_delay_of_the_row(dsn: str, db: psycopg.Connection) -> None:
    async with webhook_server(answer(429, Retry_After="120"), answer(429)) as server:
        settings = settings_for(server.port, dsn=dsn)
        asked, unasked = await deliver(db, settings, server.url(scheme="http"), passes=2)
    assert (asked.state, unasked.state) == ("pending", "pending")
    assert asked.due_in_seconds <= 120
    assert unasked.due_in_seconds > 120


@pytest.mark.slow
async def test_a_permanent_failure_stores_its_reason(dsn: str, db: psycopg.Connection) -> None:
    async with webhook_server(answer(410)) as server:
        settings = settings_for(server.port, dsn=dsn)
        guarded = settings_for(server.port, dsn=dsn, webhook_allowed_networks=None)
        url = server.url(scheme="http")
        gone = await deliver(db, settings, url)
        inside = await deliver(db, guarded, url)
        odd = await deliver(db, settings, f"http://2130706433:{server.port}/")
        injected = await deliver(db, settings, url, hook=Webhook(body=1, headers={"X-A": "1\r\nX-B: 2"}))
    assert {(row.state, row.attempt_count) for row in (*gone, *inside, *odd, *injected)} == {("failed", 1)}
    assert [row.last_error for row in (*gone, *inside, *odd, *injected)] == [
        "410 Gone",
        f"127.0.0.1: {REFUSED}",
        "destination: the host is a number, and not an address of four parts",
        "webhook.headers['X-A']: contains CR, LF or NUL",
    ]
    assert len(server.received) == 1


@pytest.mark.slow
async def test_refused_credentials_hold_the_messages_of_their_url(dsn: str, db: psycopg.Connection) -> None:
    cooldown = {"breaker_cooldown_seconds": 0.1, "breaker_max_cooldown_seconds": 0.2}
    async with webhook_server(answer(401)) as server:
        # Each message and each alert has a slot at once: one that waits for a slot for a second is released.
        settings = settings_for(
            server.port, dsn=dsn, alert_destination="mailto:ops@club.org", concurrency=200, **cooldown
        )
        outbox = Outbox(settings)

        @outbox.handler("greet", retry=RetryPolicy.steps(0.02))
        async def greet(message: Message, ctx: Context) -> Webhook:
            return Webhook(body=1)

        def states() -> set[tuple[str, bool]]:
            return {(row.state, row.attempt_count > 0) for row in rows_of(db, *ids)}

        url = server.url(scheme="http")
        ids = [enqueue(db, destination=url) for _ in range(99)] + [enqueue(db, destination=f"{url}/second")]
        async with running(Worker(outbox)):
            await until(lambda: states() == {("pending", True)})
            query = "SELECT key, last_error FROM pgoutbox.breaker WHERE starts_with(key, 'http:')"
            # Each URL has a breaker of its own, which is written beside the outcomes of the messages.
            await until(lambda: len(db.execute(query).fetchall()) == 2)
            breakers: dict[str, str] = dict(db.execute(query).fetchall())
            assert {key.rpartition(" ")[0] for key in breakers} == {f"http:{HOST}:{server.port} url"}
            assert set(breakers.values()) == {"401 Unauthorized"}
            server.answers = [answer(200)]
            await until(lambda: states() == {("sent", True)})
            await until(lambda: not db.execute(query).fetchall())
    opened = (
        "topic = 'pgoutbox.alert' AND payload ->> 'event' = 'opened' AND starts_with(payload ->> 'breaker', 'http')"
    )
    assert db.execute(f"SELECT count(*) FROM pgoutbox.message WHERE {opened}".encode()).fetchone() == (2,)
    assert {outcome for one in ids for _, outcome, _ in attempts_of(db, one)} == {"snoozed"}


@pytest.mark.slow
async def test_a_forbidden_url_holds_its_messages(dsn: str, db: psycopg.Connection) -> None:
    """The first five messages use up an attempt: the receiver may refuse their contents alone."""
    cooldown = {"breaker_cooldown_seconds": 0.1, "breaker_max_cooldown_seconds": 0.2}
    forbidden = answer(403)

    async with webhook_server(forbidden) as server:
        outbox = Outbox(settings_for(server.port, dsn=dsn, concurrency=1, **cooldown))

        @outbox.handler("greet", retry=RetryPolicy.steps(3600, jitter=0))
        async def greet(message: Message, ctx: Context) -> Webhook:
            return Webhook(body=1)

        ids = [enqueue(db, destination=server.url(scheme="http"), max_attempts=2) for _ in range(30)]
        key = "SELECT key, last_error FROM pgoutbox.breaker WHERE starts_with(key, 'http:')"
        async with running(Worker(outbox)):
            await until(lambda: db.execute(key).fetchall())
            ((breaker, error),) = db.execute(key).fetchall()
            assert (breaker.rpartition(" ")[0], error) == (f"http:{HOST}:{server.port} url", "403 Forbidden")
            server.answers = [answer(200)]
            await until(lambda: not db.execute(key).fetchall())
            db.execute("UPDATE pgoutbox.message SET available_at = now() WHERE state = 'pending'")
            await until(lambda: {row_of(db, one).state for one in ids} == {"sent"})
    outcomes = [outcome for one in ids for _, outcome, _ in attempts_of(db, one)]
    # The failure that opens the breaker uses up no attempt. A message that waits for the only slot for a second is
    # released.
    assert (outcomes.count("retry"), set(outcomes) - {"released"}) == (4, {"retry", "snoozed"})


@pytest.mark.slow
async def test_a_url_that_answers_500_does_not_hold_others_at_its_host(dsn: str, db: psycopg.Connection) -> None:
    async with webhook_server(answer(500)) as server:
        outbox = Outbox(settings_for(server.port, dsn=dsn, concurrency=1, breaker_cooldown_seconds=600))

        @outbox.handler("greet", retry=RetryPolicy.steps(3600, jitter=0))
        async def greet(message: Message, ctx: Context) -> Webhook:
            return Webhook(body=1)

        dead = [enqueue(db, destination=server.url("/dead", scheme="http"), max_attempts=2) for _ in range(30)]
        await Worker(outbox).run_once()
        assert len(server.received) == 5
        left = [row.max_attempts - row.attempt_count for row in rows_of(db, *dead)]
        assert sorted(left) == [1] * 4 + [2] * 26
        ((key,),) = db.execute("SELECT key FROM pgoutbox.breaker").fetchall()
        assert key.startswith(f"http:{HOST}:{server.port} url ")
        server.answers = [answer(200)]
        others = [enqueue(db, destination=server.url(f"/{n}", scheme="http")) for n in range(3)]
        await Worker(outbox).run_once()
    assert {row.state for row in rows_of(db, *others)} == {"sent"}
    assert {row.state for row in rows_of(db, *dead)} == {"pending"}


@pytest.mark.slow
async def test_one_forbidden_content_fails_and_does_not_hold_the_others(dsn: str, db: psycopg.Connection) -> None:
    async with webhook_server() as server:
        outbox = Outbox(settings_for(server.port, dsn=dsn, concurrency=1))

        @outbox.handler("greet", retry=RetryPolicy.steps(0.02, jitter=0))
        async def greet(message: Message, ctx: Context) -> Webhook:
            server.answers = [answer(403 if message.payload == "refused" else 200)]
            return Webhook(body=1)

        url = server.url(scheme="http")
        refused = enqueue(db, payload="refused", destination=url, max_attempts=3)
        ids = [enqueue(db, destination=url) for _ in range(10)]
        async with running(Worker(outbox)):
            await until(lambda: row_of(db, refused).state == "failed")
            await until(lambda: {row_of(db, one).state for one in ids} == {"sent"})
    assert db.execute("SELECT count(*) FROM pgoutbox.breaker").fetchone() == (0,)


async def test_a_worker_has_the_webhook_transport_by_default(dsn: str, db: psycopg.Connection) -> None:
    async with webhook_server() as server:
        outbox = Outbox(settings_for(server.port, dsn=dsn))

        @outbox.handler("greet")
        async def greet(message: Message, ctx: Context) -> Webhook:
            return HOOK

        message_id = enqueue(db, destination=server.url(scheme="http"))
        await Worker(outbox).run_once()
    assert row_of(db, message_id).state == "sent"
    (received,) = server.received
    assert verify(received.body, received.headers, NEW) == received.headers["webhook-id"]


async def test_http_is_not_served_unless_the_settings_allow_it(dsn: str, db: psycopg.Connection) -> None:
    async with webhook_server() as server:
        settings = settings_for(server.port, dsn=dsn, webhook_allow_http=False)
        (row,) = await deliver(db, settings, server.url(scheme="http"))
    assert row.state == "pending"
    assert (row.last_error or "").endswith("use https, or set PGOUTBOX_WEBHOOK_ALLOW_HTTP")
    assert server.connection_count == 0
