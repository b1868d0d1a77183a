"""Tests events to the Kafka broker that librdkafka brings for tests: acknowledgements and refusals.

This broker has neither users nor size limits; limits on those are enforced by the client here.
"""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, Producer, TopicPartition

from pgoutbox.errors import ConfigurationError
from pgoutbox.message import Permanent, Sent, Snooze, Transient, Unavailable
from pgoutbox.transports.brokers.events import CloudEvent
from pgoutbox.transports.brokers.kafka import KafkaTransport
from pgoutbox.worker import Worker
from tests.support.brokers import (
    HOST,
    TLS_HOST,
    Broker,
    Forwarder,
    assert_refused,
    forwarded,
    free_port,
    issue_certificate,
    kafka_server,
    outbox_with,
    target_repaired,
)
from tests.support.outbox_actions import attempts_of, enqueue, make_due, state_of
from tests.support.sends import closed_gate, closing, error_of, outgoing, refusal_of
from tests.support.settings import settings_with
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from pathlib import Path

    import psycopg
    from confluent_kafka import Message as Record

    Open = Callable[..., KafkaTransport]

CANARY = "canary-password"
SECRET = "secret-payload"
EVENT = CloudEvent({"order_id": 7})
MESSAGE = outgoing(destination="kafka:orders")
ID = MESSAGE.idempotency_key.encode()


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


def headers_of(record: Record) -> dict[str, object]:
    return dict(record.headers() or [])


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


async def test_an_event_is_a_record_with_its_id_key_and_envelope(broker: Broker, open_transport: Open) -> None:
    event = CloudEvent({"order_id": 7}, key="customer-7", headers={"traceparent": "00-1"})
    message = outgoing(destination="kafka:first")
    assert await open_transport(broker).send(message, event) == Sent()
    (record,) = records(broker, "first", 1)
    assert record.key() == b"customer-7"
    assert headers_of(record) == {
        "traceparent": b"00-1",
        "ce_id": ID,
        "content-type": b"application/cloudevents+json; charset=UTF-8",
    }
    envelope = json.loads(record.value() or b"")
    assert (envelope["id"], envelope["partitionkey"], envelope["data"]) == (
        ID.decode(),
        "customer-7",
        {"order_id": 7},
    )


async def test_nothing_is_handed_over_if_the_gate_is_closed_after_connecting(
    broker: Broker, open_transport: Open
) -> None:
    transport = open_transport(broker)
    with closed_gate() as asked:
        assert isinstance(await transport.send(outgoing(destination="kafka:closed"), EVENT), Snooze)
    assert asked == [None]
    assert await transport.send(outgoing(destination="kafka:closed"), EVENT) == Sent()
    assert len(records(broker, "closed", 1)) == 1


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


async def test_an_unreachable_broker_is_transient(open_transport: Open, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    transport = open_transport(
        f"{HOST}:{free_port()}", broker_timeout_seconds=1, kafka_username="app", kafka_password=CANARY
    )
    error = error_of(await transport.send(MESSAGE, EVENT), Transient)
    assert error.startswith("connect: no broker within 1 s: ")
    assert CANARY not in caplog.text + error


async def test_refused_credentials_cost_no_attempt_and_are_never_shown(
    broker: Broker, open_transport: Open, caplog: pytest.LogCaptureFixture
) -> None:
    """This broker has no users, so it refuses to sign anybody in."""
    given = {"kafka_username": "club", "kafka_password": CANARY, "kafka_mechanism": "SCRAM-SHA-256"}
    transport = open_transport(broker, broker_timeout_seconds=2, **given)
    error = error_of(await transport.send(MESSAGE, EVENT), Unavailable)
    assert "authentication" in error
    assert CANARY not in error + caplog.text


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


async def test_a_repetition_after_a_lost_acknowledgement_has_the_same_id(broker: Broker, open_transport: Open) -> None:
    transport, message = open_transport(broker, broker_timeout_seconds=2), outgoing(destination="kafka:lost")
    first = outgoing(message_id=1, destination="kafka:warm")
    assert await transport.send(first, EVENT) == Sent()
    with broker.frozen():
        assert error_of(await transport.send(message, EVENT), Transient).startswith("outcome unknown: ")
    again = outgoing(destination="kafka:lost", attempt_count=2)
    outcome = await transport.send(again, EVENT)
    if outcome != Sent():  # The client may need longer to notice that the broker is available again.
        outcome = await open_transport(broker).send(again, EVENT)
    assert outcome == Sent()
    assert {headers_of(record)["ce_id"] for record in records(broker, "lost", 1)} == {ID}


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


@pytest.mark.parametrize("topic", ["a%20b", "a/b", "..", "%C3%BC", "x" * 250, "a%0A"])
async def test_an_invalid_name_is_permanent_before_any_connection(open_transport: Open, topic: str) -> None:
    transport = open_transport(f"{HOST}:1")
    error = error_of(await transport.send(outgoing(destination=f"kafka:{topic}"), EVENT), Permanent)
    assert error.startswith("destination: ")
    assert transport._link is None


async def test_a_worker_delivers_when_the_server_is_back(broker: Broker, dsn: str, db: psycopg.Connection) -> None:
    forwarder = Forwarder(broker.port)
    outbox = outbox_with(dsn, kafka_servers=f"{HOST}:{forwarder.port}", kafka_security="none")
    message_id = enqueue(db, payload={"order_id": 7}, destination="kafka:worker")
    await Worker(outbox).run_once()
    assert state_of(db, message_id) == "pending"
    await forwarder.listen()
    make_due(db, message_id)
    wrong = enqueue(db, destination="kafka:a/b")
    await Worker(outbox).run_once()
    await forwarder.cut()
    assert (state_of(db, message_id), state_of(db, wrong)) == ("sent", "failed")
    ((number, outcome, error),) = attempts_of(db, message_id)
    assert (number, outcome) == (1, "retry")
    assert (error or "").startswith("connect: ")
    (record,) = records(broker, "worker", 1)
    assert str(headers_of(record)["ce_id"]).startswith(f"b'{message_id}-")


@pytest.mark.parametrize(
    ("given", "error"),
    [
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
    ],
)
def test_an_unusable_setting_is_refused_by_name_at_the_start(given: dict[str, object], error: str) -> None:
    with pytest.raises(ConfigurationError, match=error):
        KafkaTransport(settings_with(**given))
