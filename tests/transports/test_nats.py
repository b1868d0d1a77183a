"""Tests events to streams of a real NATS: deliveries, recognised repetitions, and refusals."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from typing import TYPE_CHECKING, ClassVar
from urllib.parse import quote

import nats
import pytest
from nats.js.api import StreamConfig

from pgoutbox.message import Permanent, Sent, Transient, Unavailable
from pgoutbox.transports.brokers.events import CloudEvent
from pgoutbox.transports.brokers.nats_jetstream import NatsTransport
from tests.support.brokers import HOST, TLS_HOST, Broker, TlsBroker, nats_server, target_repaired, tls_nats_server
from tests.support.ports import free_port
from tests.support.sends import closing, error_of, outgoing, refusal_of
from tests.support.settings import settings_with
from tests.transports.contract import (
    CANARY,
    EVENT,
    PASSWORD,
    Arrived,
    Target,
    TlsContract,
    assert_pending_send_fails_at_once,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Sequence

    import psycopg
    from nats.aio.client import Client
    from nats.js.api import RawStreamMsg

    from pgoutbox import Settings
    from pgoutbox.message import Outcome
    from tests.support.brokers import Forwarder

    Open = Callable[..., NatsTransport]

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
    async with client_of(broker) as opened, orders_of(opened, max_msg_size=max_msg_size) as client:
        yield client


@contextlib.asynccontextmanager
async def orders_of(client: Client, *, max_msg_size: int = -1) -> AsyncIterator[Client]:
    """Create the stream on a connection, and delete it and close the connection at the end."""
    try:
        config = StreamConfig(name="ORDERS", subjects=["orders.>"], max_msg_size=max_msg_size)
        await client.jetstream().add_stream(config)
        yield client
        await client.jetstream().delete_stream("ORDERS")
    finally:
        await client.close()


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


@pytest.fixture(scope="module")
def tls_broker(broker: Broker) -> Iterator[TlsBroker]:
    with tls_nats_server(ACCOUNTS.replace("app, password: secret", f'app, password: "{CANARY}"'), broker) as tls_broker:
        yield tls_broker


class TestContract(TlsContract):
    scheme = "nats"
    refusal = "connect: nats: 'Authorization Violation'"
    prefix = "ce-"
    spelled: ClassVar[dict[str, str]] = {
        "ce-subject": "50%25%20%C3%BC",
        "ce-datacontenttype": "application/json",
    }
    copies = (1,)  # NATS recognises the repetition by its id.
    plain_text_error = "the server does not offer TLS, and plain text is refused"
    invalid: ClassVar[dict[str, str]] = {
        "nats:orders.*": "has a wildcard",
        "nats:orders.>": "has a wildcard",
        "nats:orders..placed": "a part of the subject between dots is empty",
        "nats:.orders": "a part of the subject between dots is empty",
        "nats:orders%20placed": "contains white space",
        "nats:orders%0D%0APUB%20x%200": "contains CR, LF or NUL",
        "nats:$JS.API.STREAM.DELETE.ORDERS": "is one of NATS itself",
        "nats:_INBOX.a.b": "is one of NATS itself",
        "nats://127.0.0.1:4222/orders": "names a server",
    }
    unusable: ClassVar[Sequence[tuple[dict[str, object], str]]] = [
        ({}, "set PGOUTBOX_NATS_URL"),
        ({"nats_url": f"http://:{CANARY}@host"}, r"PGOUTBOX_NATS_URL=\(hidden\): is not a URL"),
        ({"nats_url": "nats://host:99999"}, r"PGOUTBOX_NATS_URL=\(hidden\): is not a URL"),
    ]

    def transport(self, settings: Settings) -> NatsTransport:
        return NatsTransport(settings)

    def settings(self, port: int, password: str = PASSWORD) -> dict[str, object]:
        return {"nats_url": f"nats://app:{quote(password, safe='')}@{HOST}:{port}"}

    @contextlib.asynccontextmanager
    async def target(self, broker: Broker) -> AsyncIterator[Target]:
        async with stream(broker) as client:
            yield self._target(client)

    def tls_settings(self, port: int, host: str, ca_file: str | None) -> dict[str, object]:
        # A second server, whose URL does not request TLS, gets the same password and must encrypt as well.
        user = f"app:{quote(CANARY, safe='')}"
        return {"nats_url": f"tls://{user}@{host}:{port},nats://{host}:{port}", "nats_ca_file": ca_file}

    @contextlib.asynccontextmanager
    async def tls_target(self, tls_broker: TlsBroker) -> AsyncIterator[Target]:
        context = ssl.create_default_context(cafile=tls_broker.certificate.ca_file)
        url = f"tls://{TLS_HOST}:{tls_broker.tls_port}"
        async with orders_of(await nats.connect(url, user="app", password=CANARY, tls=context)) as client:
            yield self._target(client)

    def check_plain_text(self, outcome: Outcome, forwarder: Forwarder) -> None:
        assert forwarder.said == b""

    def _target(self, client: Client) -> Target:
        async def arrived(_: int) -> list[Arrived]:
            found = []
            for message in await stored(client):
                assert message.subject == "orders.placed"
                headers = dict(message.headers or {})
                known = headers.pop("Nats-Msg-Id"), headers.pop("Content-Type")
                found.append(Arrived(*known, headers, message.data or b""))
            return found

        return Target("nats:orders.placed", arrived)


async def test_pending_sends_learn_at_once_that_the_server_is_gone(open_transport: Open) -> None:
    with nats_server() as broker:
        transport = open_transport(f"nats://{HOST}:{broker.port}", broker_timeout_seconds=600)
        assert isinstance(await transport.send(MESSAGE, EVENT), Unavailable)

        async def stop() -> None:
            broker.stop()

        await assert_pending_send_fails_at_once(transport, broker, "nats:orders.placed", stop)


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


@pytest.mark.slow
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
