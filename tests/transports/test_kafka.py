"""Tests events to the Kafka broker that librdkafka brings for tests: acknowledgements and refusals.

This broker has neither users nor size limits; limits on those are enforced by the client here.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import ssl
from itertools import count
from typing import TYPE_CHECKING, ClassVar

import pytest
from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, Producer, TopicPartition

from pgoutbox.message import Permanent, SendFailure, Sent, Transient
from pgoutbox.transports.brokers.events import CloudEvent
from pgoutbox.transports.brokers.kafka import KafkaTransport
from tests.support.brokers import (
    HOST,
    TLS_HOST,
    Broker,
    assert_refused,
    forwarded,
    issue_certificate,
    kafka_server,
    target_repaired,
)
from tests.support.ports import free_port
from tests.support.sends import closing, error_of, outgoing, refusal_of
from tests.support.settings import settings_with
from tests.support.waiting import until
from tests.transports.contract import CANARY, EVENT, SECRET, Arrived, BrokerContract, Target

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Sequence
    from pathlib import Path

    import psycopg
    from confluent_kafka import Message as Record

    from pgoutbox import Settings

    Open = Callable[..., KafkaTransport]

pytestmark = pytest.mark.slow

NUMBERS = count(1)
ID = outgoing().idempotency_key.encode()


@pytest.fixture(scope="module")
def broker() -> Iterator[Broker]:
    with kafka_server() as broker:
        yield broker


def records(broker: Broker, topic: str, count: int) -> list[Record]:
    """Return at least this many of the first records of a topic."""
    consumer = Consumer({"bootstrap.servers": f"{HOST}:{broker.port}", "group.id": "test", "log_level": 0})
    try:
        partitions = consumer.list_topics(topic, timeout=30).topics[topic].partitions
        consumer.assign([TopicPartition(topic, number, OFFSET_BEGINNING) for number in partitions])
        found: list[Record] = []
        while len(found) < count:
            more = consumer.consume(1_000, timeout=1)
            assert more or not found, f"{len(found)} records of {count}"
            found += more
        return found
    finally:
        consumer.close()


def headers_of(record: Record) -> dict[str, bytes]:
    return dict(record.headers() or [])  # type: ignore[arg-type]


@pytest.fixture
async def open_transport() -> AsyncIterator[Open]:
    def make(servers: Broker | str, **overrides: object) -> KafkaTransport:
        given: dict[str, object] = {
            "kafka_servers": servers if isinstance(servers, str) else f"{HOST}:{servers.port}",
            "kafka_security": "none",
            "event_source": "https://club.example.org",
            "broker_timeout_seconds": 10,
        }
        return KafkaTransport(settings_with(**(given | overrides)))

    async with closing(make) as make_one:
        yield make_one


class TestContract(BrokerContract):
    """This broker has no users, so it refuses to sign anybody in."""

    scheme = "kafka"
    seconds = 10
    lost_seconds = 2
    refusal = "authentication"
    prefix = "ce_"
    id_headers = ("ce_id",)
    copies = (1, 2)  # The first one may have been lost with its answer.
    invalid: ClassVar[dict[str, str]] = {
        f"kafka:{topic}": "" for topic in ("a/b", "a%20b", "..", "%C3%BC", "x" * 250, "a%0A")
    }
    unusable: ClassVar[Sequence[tuple[dict[str, object], str]]] = [
        ({}, "set PGOUTBOX_KAFKA_SERVERS"),
        ({"kafka_servers": "host"}, "PGOUTBOX_KAFKA_SERVERS='host': must be host:port"),
        ({"kafka_servers": "host:1", "kafka_username": "app"}, "PGOUTBOX_KAFKA_PASSWORD is not"),
        (
            {
                "kafka_servers": "host:1",
                "kafka_username": "app",
                "kafka_password": CANARY,
                "kafka_security": "none",
                "kafka_mechanism": "PLAIN",
            },
            "would send PGOUTBOX_KAFKA_PASSWORD in plain text",
        ),
    ]

    def transport(self, settings: Settings) -> KafkaTransport:
        return KafkaTransport(settings)

    def settings(self, port: int, password: str | None = None) -> dict[str, object]:
        given: dict[str, object] = {"kafka_servers": f"{HOST}:{port}", "kafka_security": "none"}
        if password is not None:
            given |= {"kafka_username": "club", "kafka_password": password, "kafka_mechanism": "SCRAM-SHA-256"}
            given["broker_timeout_seconds"] = 2
        return given

    @contextlib.asynccontextmanager
    async def target(self, broker: Broker) -> AsyncIterator[Target]:
        topic = f"orders-{next(NUMBERS)}"

        async def arrived(count: int) -> list[Arrived]:
            found = []
            for record in records(broker, topic, count):
                headers = {name: value.decode() for name, value in headers_of(record).items()}
                known = headers["ce_id"], headers.pop("content-type")
                found.append(Arrived(*known, headers, record.value() or b""))
            return found

        yield Target(f"kafka:{topic}", arrived)


async def test_the_key_is_the_key_of_the_record_and_in_the_envelope(broker: Broker, open_transport: Open) -> None:
    message = outgoing(destination="kafka:first")
    assert await open_transport(broker).send(message, CloudEvent(1, key="customer-7")) == Sent()
    (record,) = records(broker, "first", 1)
    assert record.key() == b"customer-7"
    assert json.loads(record.value() or b"")["partitionkey"] == "customer-7"


async def test_events_with_one_key_are_in_one_partition(broker: Broker, open_transport: Open) -> None:
    transport = open_transport(broker)
    messages = [outgoing(message_id=number, destination="kafka:many") for number in range(100)]
    outcomes = await asyncio.gather(
        *(transport.send(message, CloudEvent(1, key=str(message.id % 5))) for message in messages)
    )
    assert outcomes == [Sent()] * 100
    found = records(broker, "many", 100)
    assert len(found) == 100
    assert len({(record.key(), record.partition()) for record in found}) == 5


async def test_a_broker_without_tls_gets_nothing_from_a_client_that_requires_it(
    broker: Broker, open_transport: Open, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with forwarded(broker.port) as forwarder:
        transport = open_transport(
            f"{HOST}:{forwarder.port}",
            kafka_security="tls",
            kafka_username="app",
            kafka_password=CANARY,
            broker_timeout_seconds=2,
        )
        outcome = await transport.send(outgoing(destination="kafka:refused"), CloudEvent(SECRET))
    assert_refused(outcome, "connect: no broker within 2 s: ", {CANARY, SECRET}, caplog.text, forwarder)
    # librdkafka has two texts for the end of a handshake; the state is in both.
    assert "in state SSL_HANDSHAKE" in error_of(outcome, Transient)


async def test_the_ca_file_decides_about_the_certificate(open_transport: Open, tmp_path: Path) -> None:
    certificate = issue_certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate.cert_file, certificate.key_file)

    async def send_to(host: str, ca_file: str | None) -> tuple[str, bool]:
        """Return the error about a server that only completes the handshake, and whether it received anything
        afterwards."""
        heard: list[bytes] = []

        async def hear(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            heard.append(await reader.read(1))
            writer.transport.abort()

        server = await asyncio.start_server(hear, HOST, 0, ssl=context)
        transport = open_transport(
            f"{host}:{server.sockets[0].getsockname()[1]}",
            kafka_security="tls",
            kafka_ca_file=ca_file,
            broker_timeout_seconds=2,
        )
        outcome = await transport.send(outgoing(destination="kafka:judged"), CloudEvent(SECRET))
        server.close()
        return error_of(outcome, Transient), any(heard)

    unknown, other_host, known = await asyncio.gather(
        send_to(TLS_HOST, None), send_to(HOST, certificate.ca_file), send_to(TLS_HOST, certificate.ca_file)
    )
    for said, was_heard in (unknown, other_host):
        assert "certificate verify failed" in said
        assert not was_heard
    said, was_heard = known
    assert "certificate" not in said
    assert was_heard


async def test_an_oversized_event_is_permanent_and_does_not_disturb_others(
    broker: Broker, open_transport: Open
) -> None:
    transport, message = open_transport(broker), outgoing(destination="kafka:large")
    outcomes = await asyncio.gather(
        *(transport.send(message, event) for event in (EVENT, CloudEvent("x" * 1_000_000), EVENT))
    )
    assert "Message size too large" in error_of(outcomes.pop(1), Permanent)
    assert outcomes == [Sent()] * 2


async def test_a_cancelled_event_is_not_sent_during_the_close(broker: Broker, open_transport: Open) -> None:
    transport = open_transport(broker)
    assert await transport.send(outgoing(message_id=1, destination="kafka:warm"), EVENT) == Sent()
    with broker.frozen():
        sending = asyncio.create_task(transport.send(outgoing(destination="kafka:cancelled"), EVENT))
        await until(lambda: transport._link is not None and len(transport._link._producer) == 1)
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        await transport.aclose()
    for number in range(3):
        assert await transport.send(outgoing(message_id=number, destination="kafka:cancelled"), EVENT) == Sent()
    assert ID not in {headers_of(record)["ce_id"] for record in records(broker, "cancelled", 3)}


async def test_messages_wait_until_their_topic_exists(broker: Broker, dsn: str, db: psycopg.Connection) -> None:
    """This broker creates topics on demand, and its clients can forbid that."""
    create = Producer({"bootstrap.servers": f"{HOST}:{broker.port}", "log_level": 0})
    create.list_topics("existing", timeout=30)
    async with target_repaired(
        dsn,
        db,
        broken="kafka:missing",
        working="kafka:existing",
        breakers={"kafka:topic missing"},
        make=lambda settings: KafkaTransport(settings, options={"allow.auto.create.topics": False}),
        kafka_servers=f"{HOST}:{broker.port}",
        kafka_security="none",
    ):
        create.list_topics("missing", timeout=30)
    assert len(records(broker, "missing", 20)) == 20


@pytest.mark.parametrize("code", [KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.UNKNOWN_TOPIC_OR_PART])
async def test_a_topic_that_the_broker_refuses_is_unavailable(open_transport: Open, code: int) -> None:
    transport = open_transport(f"{HOST}:{free_port()}")
    assert refusal_of(transport._refusal("orders", KafkaError(code))).startswith("kafka:topic orders: produce: ")


async def test_a_broker_that_answers_late_is_reached(open_transport: Open) -> None:
    with kafka_server(round_trip_milliseconds=700) as broker:
        transport = open_transport(broker, broker_timeout_seconds=30)
        assert await transport.check() == Sent()
        assert await transport.send(outgoing(destination="kafka:far"), EVENT) == Sent()


async def test_an_invalid_option_of_the_client_is_named() -> None:
    settings = settings_with(
        kafka_servers=f"{HOST}:{free_port()}", kafka_security="none", event_source="https://club.org"
    )
    transport = KafkaTransport(settings, options={"lingerr.ms": 5})
    for outcome in (await transport.check(), await transport.send(outgoing(destination="kafka:orders"), EVENT)):
        assert error_of(outcome, SendFailure) == 'connect: No such configuration property: "lingerr.ms"'
