"""Tests events to streams of a real NATS: deliveries, recognised repetitions, and refusals."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import ssl
from typing import TYPE_CHECKING

import nats
import pytest
from nats.js.api import StreamConfig

from pgoutbox.errors import ConfigurationError
from pgoutbox.message import Permanent, Sent, Snooze, Transient, Unavailable
from pgoutbox.transports.brokers.events import CloudEvent
from pgoutbox.transports.brokers.nats_jetstream import NatsTransport
from pgoutbox.worker import Worker
from tests.support.brokers import (
    HOST,
    TLS_HOST,
    TLS_REFUSALS,
    Broker,
    TlsBroker,
    assert_refused,
    forwarded,
    free_port,
    nats_server,
    outbox_with,
    target_repaired,
    tls_nats_server,
)
from tests.support.outbox_actions import attempts_of, enqueue, make_due, state_of
from tests.support.sends import closed_gate, closing, error_of, outgoing, refusal_of
from tests.support.settings import settings_with

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    import psycopg
    from nats.aio.client import Client
    from nats.js.api import RawStreamMsg

    Open = Callable[..., NatsTransport]

CANARY = "canary/password"
SECRET = "secret-payload"
EVENT = CloudEvent({"order_id": 7})
MESSAGE = outgoing(destination="nats:orders.placed")
ID = MESSAGE.idempotency_key
AGAIN = outgoing(destination="nats:orders.placed", attempt_count=2)

ACCOUNTS = """
max_payload: 100000
authorization {
  users = [
    { user: app, password: secret }
    { user: "odd@user", password: "a/b:c@d" }
    { user: reader, password: secret, permissions: { publish: { deny: "orders.>" } } }
  ]
}
"""


@pytest.fixture(scope="module")
def broker() -> Iterator[Broker]:
    with nats_server(ACCOUNTS) as broker:
        yield broker


def url_of(broker: Broker, user: str = "app", password: str = "secret") -> str:
    return f"nats://{user}:{password}@{HOST}:{broker.port}"


@contextlib.asynccontextmanager
async def client_of(broker: Broker) -> AsyncIterator[Client]:
    client = await nats.connect(f"nats://{HOST}:{broker.port}", user="app", password="secret")
    try:
        yield client
    finally:
        await client.close()


@contextlib.asynccontextmanager
async def stream(broker: Broker, *, max_msg_size: int = -1) -> AsyncIterator[Client]:
    """Create an empty stream of all orders, and a connection to read it."""
    async with client_of(broker) as client:
        config = StreamConfig(name="ORDERS", subjects=["orders.>"], max_msg_size=max_msg_size)
        await client.jetstream().add_stream(config)
        try:
            yield client
        finally:
            await client.jetstream().delete_stream("ORDERS")


async def stored(client: Client) -> list[RawStreamMsg]:
    state = (await client.jetstream().stream_info("ORDERS")).state
    return [await client.jetstream().get_msg("ORDERS", seq) for seq in range(1, state.messages + 1)]


@pytest.fixture
async def open_transport() -> AsyncIterator[Open]:
    def make(url: Broker | str, **overrides: object) -> NatsTransport:
        given: dict[str, object] = {
            "nats_url": url if isinstance(url, str) else url_of(url),
            "event_source": "https://club.example.org",
            "broker_timeout_seconds": 5,
        }
        return NatsTransport(settings_with(**(given | overrides)))

    async with closing(make) as make_one:
        yield make_one


async def test_an_event_is_stored_with_its_id_and_envelope(broker: Broker, open_transport: Open) -> None:
    async with stream(broker) as client:
        event = CloudEvent({"order_id": 7}, headers={"traceparent": "00-1"})
        assert await open_transport(broker).send(MESSAGE, event) == Sent()
        (message,) = await stored(client)
    assert message.subject == "orders.placed"
    assert message.headers == {
        "traceparent": "00-1",
        "Nats-Msg-Id": ID,
        "Content-Type": "application/cloudevents+json; charset=UTF-8",
    }
    envelope = json.loads(message.data or b"")
    assert (envelope["id"], envelope["data"]) == (ID, {"order_id": 7})


async def test_nothing_is_handed_over_if_the_gate_is_closed_after_connecting(
    broker: Broker, open_transport: Open
) -> None:
    async with stream(broker) as client:
        transport = open_transport(broker)
        with closed_gate() as asked:
            assert isinstance(await transport.send(MESSAGE, EVENT), Snooze)
        assert (asked, await stored(client)) == ([None], [])


async def test_a_repeated_event_is_sent_again_and_stored_once(broker: Broker, open_transport: Open) -> None:
    async with stream(broker) as client:
        transport = open_transport(broker)
        for message in (MESSAGE, AGAIN):
            assert await transport.send(message, EVENT) == Sent()
        assert len(await stored(client)) == 1


async def test_all_sends_share_one_connection(broker: Broker, open_transport: Open) -> None:
    async with stream(broker) as client:
        transport = open_transport(broker)
        async with client_of(broker) as earlier:
            before = earlier.client_id or 0
        outcomes = await asyncio.gather(
            *(transport.send(outgoing(message_id=number, destination="nats:orders.a"), EVENT) for number in range(100))
        )
        assert outcomes == [Sent()] * 100
        assert (await client.jetstream().stream_info("ORDERS")).state.messages == 100
        async with client_of(broker) as later:
            assert (later.client_id or 0) - before == 2


async def test_an_unreachable_server_is_transient_and_a_refused_password_is_an_outage(
    broker: Broker, open_transport: Open, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    quoted = CANARY.replace("/", "%2F")
    transport = open_transport(f"nats://app:{quoted}@{HOST}:{free_port()}")
    assert error_of(await transport.send(MESSAGE, EVENT), Transient).startswith("connect: ")
    transport = open_transport(url_of(broker, password=quoted))
    error = error_of(await transport.send(MESSAGE, EVENT), Unavailable)
    assert error == "connect: nats: 'Authorization Violation'"
    for text in (CANARY, quoted):
        assert text not in caplog.text


async def test_credentials_are_percent_decoded(broker: Broker, open_transport: Open) -> None:
    async with stream(broker):
        assert await open_transport(url_of(broker, "odd%40user", "a%2Fb%3Ac%40d")).send(MESSAGE, EVENT) == Sent()


async def test_the_next_server_is_tried_if_the_first_is_unreachable(broker: Broker, open_transport: Open) -> None:
    async with stream(broker):
        transport = open_transport(f"nats://app:secret@{HOST}:{free_port()},nats://{HOST}:{broker.port}")
        assert await transport.send(MESSAGE, EVENT) == Sent()


async def test_a_subject_without_a_stream_is_unavailable(broker: Broker, open_transport: Open) -> None:
    said = refusal_of(await open_transport(broker).send(MESSAGE, EVENT))
    assert said == "nats:subject orders.placed: no stream has the subject 'orders.placed'"


async def test_a_subject_without_publish_permission_is_unavailable(broker: Broker, open_transport: Open) -> None:
    async with stream(broker) as client:
        transport = open_transport(url_of(broker, "reader"))
        said = refusal_of(await transport.send(MESSAGE, EVENT))
        reason = 'publish: nats: permissions violation for publish to "orders.placed"'
        assert said == f"nats:subject orders.placed: {reason}"
        assert await stored(client) == []


async def test_an_oversized_event_is_permanent_and_keeps_the_connection(broker: Broker, open_transport: Open) -> None:
    async with stream(broker, max_msg_size=50_000) as client:
        transport = open_transport(broker)
        assert "of bytes are more" not in error_of(await transport.send(MESSAGE, CloudEvent("x" * 60_000)), Permanent)
        # The headers make it too large: the client checks only the content.
        header = {"h": "x" * 1_000}
        edge = CloudEvent("x" * (100_000 - 400), headers=header)
        error = error_of(await transport.send(MESSAGE, edge), Permanent)
        assert error.endswith("bytes with their headers are more than the server's 100000")
        assert await transport.send(MESSAGE, EVENT) == Sent()
        assert len(await stored(client)) == 1


async def test_a_full_stream_is_transient(broker: Broker, open_transport: Open) -> None:
    async with client_of(broker) as client:
        config = StreamConfig(name="ORDERS", subjects=["orders.>"], max_msgs=1, discard="new")  # type: ignore[arg-type]
        await client.jetstream().add_stream(config)
        transport = open_transport(broker)
        assert await transport.send(MESSAGE, EVENT) == Sent()
        other = outgoing(message_id=8, destination="nats:orders.placed")
        assert "maximum messages exceeded" in error_of(await transport.send(other, EVENT), Transient)
        await client.jetstream().delete_stream("ORDERS")


async def test_a_repetition_after_a_lost_answer_is_recognised(broker: Broker, open_transport: Open) -> None:
    async with stream(broker) as client:
        transport = open_transport(broker, broker_timeout_seconds=0.5)
        assert await transport.send(outgoing(message_id=1, destination="nats:orders.a"), EVENT) == Sent()
        with broker.frozen():
            error = error_of(await transport.send(MESSAGE, EVENT), Transient)
        assert error.startswith("outcome unknown: no acknowledgement: ")
        assert await transport.send(AGAIN, EVENT) == Sent()
        messages = await stored(client)
    assert [message.headers["Nats-Msg-Id"] for message in messages if message.headers][1:] == [ID]


async def test_pending_sends_learn_at_once_that_the_server_is_gone(open_transport: Open) -> None:
    with nats_server() as broker:
        transport = open_transport(f"nats://{HOST}:{broker.port}", broker_timeout_seconds=600)
        assert isinstance(await transport.send(MESSAGE, EVENT), Unavailable)
        with broker.frozen():
            sending = asyncio.create_task(transport.send(MESSAGE, EVENT))
            await asyncio.sleep(0)  # It publishes on the existing connection, and waits.
            broker.stop()
        async with asyncio.timeout(30):
            assert error_of(await sending, Transient).startswith("outcome unknown: no acknowledgement: ")


@pytest.mark.parametrize(
    ("subject", "error"),
    [
        ("orders.*", "has a wildcard"),
        ("orders.>", "has a wildcard"),
        ("orders..placed", "a part of the subject between dots is empty"),
        (".orders", "a part of the subject between dots is empty"),
        ("orders%20placed", "contains white space"),
        ("orders%0D%0APUB%20x%200", "contains CR, LF or NUL"),
        ("$JS.API.STREAM.DELETE.ORDERS", "is one of NATS itself"),
        ("_INBOX.a.b", "is one of NATS itself"),
        ("//127.0.0.1:4222/orders", "names a server"),
    ],
)
async def test_an_invalid_subject_is_permanent_before_any_connection(
    open_transport: Open, subject: str, error: str
) -> None:
    transport = open_transport(f"nats://{HOST}:1")
    said = error_of(await transport.send(outgoing(destination=f"nats:{subject}"), EVENT), Permanent)
    assert said.startswith("destination: ")
    assert error in said


@pytest.fixture(scope="module")
def tls_broker(broker: Broker) -> Iterator[TlsBroker]:
    with tls_nats_server(ACCOUNTS.replace("app, password: secret", f'app, password: "{CANARY}"'), broker) as tls_broker:
        yield tls_broker


def tls_url_of(port: int, host: str = TLS_HOST) -> str:
    return f"tls://app:{CANARY.replace('/', '%2F')}@{host}:{port}"


async def test_with_tls_nothing_is_sent_in_plain_text(tls_broker: TlsBroker, open_transport: Open) -> None:
    ca_file = tls_broker.certificate.ca_file
    context = ssl.create_default_context(cafile=ca_file)
    port = tls_broker.tls_port
    async with forwarded(port) as forwarder:
        client = await nats.connect(f"tls://{TLS_HOST}:{port}", user="app", password=CANARY, tls=context)
        await client.jetstream().add_stream(StreamConfig(name="ORDERS", subjects=["orders.>"]))
        transport = open_transport(tls_url_of(forwarder.port), nats_ca_file=ca_file)
        assert await transport.send(MESSAGE, CloudEvent(SECRET)) == Sent()
        (message,) = await stored(client)
        await client.close()
    assert json.loads(message.data or b"")["data"] == SECRET
    for text in (CANARY, SECRET):
        assert text.encode() not in forwarder.said


@pytest.mark.parametrize(("host", "is_tls", "is_known", "error"), TLS_REFUSALS)
async def test_a_server_with_a_wrong_certificate_gets_nothing(
    tls_broker: TlsBroker,
    open_transport: Open,
    caplog: pytest.LogCaptureFixture,
    host: str,
    is_tls: bool,
    is_known: bool,
    error: str,
) -> None:
    caplog.set_level(logging.DEBUG)
    async with forwarded(tls_broker.tls_port if is_tls else tls_broker.plain_port) as forwarder:
        ca_file = tls_broker.certificate.ca_file if is_known else None
        # A second server, whose URL does not request TLS, gets the same password and must encrypt as well.
        urls = tls_url_of(forwarder.port, host) + f",nats://{host}:{forwarder.port}"
        outcome = await open_transport(urls, nats_ca_file=ca_file).send(MESSAGE, CloudEvent(SECRET))
    said = error or "the server does not offer TLS, and plain text is refused"
    assert_refused(outcome, f"connect: {said}", {CANARY, SECRET}, caplog.text, forwarder)
    if not is_tls:
        assert forwarder.said == b""


async def test_messages_wait_until_a_stream_has_their_subject(broker: Broker, dsn: str, db: psycopg.Connection) -> None:
    async with (
        stream(broker) as client,
        target_repaired(
            dsn,
            db,
            broken="nats:invoices.paid",
            working="nats:orders.placed",
            breakers={"nats:subject invoices.paid"},
            nats_url=url_of(broker),
        ),
    ):
        await client.jetstream().update_stream(StreamConfig(name="ORDERS", subjects=["orders.>", "invoices.>"]))


async def test_a_worker_delivers_when_the_server_is_back(dsn: str, db: psycopg.Connection) -> None:
    with nats_server(ACCOUNTS) as broker:
        outbox = outbox_with(dsn, nats_url=url_of(broker))
        async with client_of(broker) as client:
            await client.jetstream().add_stream(StreamConfig(name="ORDERS", subjects=["orders.>"]))
        broker.stop()
        message_id = enqueue(db, payload={"order_id": 7}, destination="nats:orders.placed")
        await Worker(outbox).run_once()
        assert state_of(db, message_id) == "pending"
        broker.start()
        make_due(db, message_id)
        wrong = enqueue(db, destination="nats:orders.*")
        await Worker(outbox).run_once()
        assert (state_of(db, message_id), state_of(db, wrong)) == ("sent", "failed")
        ((number, outcome, error),) = attempts_of(db, message_id)
        assert (number, outcome) == (1, "retry")
        assert (error or "").startswith("connect: ")
        async with client_of(broker) as client:
            (message,) = await stored(client)
    assert (message.headers or {})["Nats-Msg-Id"].startswith(f"{message_id}-")


@pytest.mark.parametrize(
    ("url", "error"),
    [
        (None, "set PGOUTBOX_NATS_URL"),
        (f"http://:{CANARY}@host", r"PGOUTBOX_NATS_URL=\(hidden\): is not a URL"),
        ("nats://host:99999", r"PGOUTBOX_NATS_URL=\(hidden\): is not a URL"),
    ],
)
def test_an_unusable_setting_is_refused_by_name_at_the_start(url: str | None, error: str) -> None:
    with pytest.raises(ConfigurationError, match=error):
        NatsTransport(settings_with(nats_url=url))
