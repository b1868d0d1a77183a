"""Tests events to a real RabbitMQ: confirmations, returned messages, and the effect of one refusal on others."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from typing import TYPE_CHECKING

import aiormq
import pytest

from pgoutbox.errors import ConfigurationError
from pgoutbox.message import Permanent, Sent, Snooze, Transient, Unavailable
from pgoutbox.transports.brokers.events import CloudEvent
from pgoutbox.transports.brokers.rabbitmq import RabbitMQTransport
from pgoutbox.worker import Worker
from tests.support.brokers import (
    HOST,
    RABBITMQ_MAX_BYTES,
    RABBITMQ_TLS_PASSWORD,
    TLS_HOST,
    TLS_REFUSALS,
    Broker,
    Forwarder,
    TlsBroker,
    assert_refused,
    forwarded,
    free_port,
    outbox_with,
    rabbitmq_server,
    target_repaired,
)
from tests.support.outbox_actions import attempts_of, enqueue, make_due, state_of
from tests.support.sends import closed_gate, closing, error_of, outgoing, refusal_of
from tests.support.settings import settings_with

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    import psycopg
    from aiormq.abc import AbstractChannel, DeliveredMessage

    Open = Callable[..., RabbitMQTransport]

CANARY = RABBITMQ_TLS_PASSWORD
SECRET = "secret-payload"
EVENT = CloudEvent({"order_id": 7})
MESSAGE = outgoing(destination="rabbitmq:orders/order.placed")
ID = MESSAGE.idempotency_key


@pytest.fixture(scope="module")
def tls_broker() -> Iterator[TlsBroker]:
    with rabbitmq_server() as broker:
        yield broker


@pytest.fixture(scope="module")
def broker(tls_broker: TlsBroker) -> Broker:
    return tls_broker.broker


def url_of(port: int, user: str = "app", password: str = "secret") -> str:
    return f"amqp://{user}:{password}@{HOST}:{port}"


def tls_url_of(port: int, host: str = TLS_HOST) -> str:
    return f"amqps://tls:{CANARY.replace('/', '%2F')}@{host}:{port}"


@contextlib.asynccontextmanager
async def channel_to(broker: Broker) -> AsyncIterator[AbstractChannel]:
    connection = await aiormq.connect(url_of(broker.port))
    try:
        yield await connection.channel()
    finally:
        await connection.close()


@pytest.fixture
async def channel(broker: Broker) -> AsyncIterator[AbstractChannel]:
    """Open a channel for checks. The exchange `orders` routes `order.#` to the empty queue `placed`."""
    async with channel_to(broker) as channel:
        await channel.exchange_declare("orders", exchange_type="topic")
        await channel.queue_declare("placed")
        await channel.queue_bind("placed", "orders", "order.#")
        yield channel
        async with channel_to(broker) as other:
            await other.queue_delete("placed")
            await other.exchange_delete("orders")


async def queued(channel: AbstractChannel, queue: str = "placed") -> list[DeliveredMessage]:
    """Return the messages of a queue, and remove them."""
    found: list[DeliveredMessage] = []
    while True:
        message = await channel.basic_get(queue, no_ack=True)
        if message.delivery_tag is None:
            return found
        found.append(message)


@pytest.fixture
async def open_transport() -> AsyncIterator[Open]:
    def make(url: Broker | str, **overrides: object) -> RabbitMQTransport:
        given: dict[str, object] = {
            "rabbitmq_url": url if isinstance(url, str) else url_of(url.port),
            "event_source": "https://club.example.org",
            "broker_timeout_seconds": 10,
        }
        return RabbitMQTransport(settings_with(**(given | overrides)))

    async with closing(make) as make_one:
        yield make_one


async def test_an_event_is_queued_with_its_id_and_envelope(
    broker: Broker, channel: AbstractChannel, open_transport: Open
) -> None:
    event = CloudEvent({"order_id": 7}, headers={"traceparent": "00-1"})
    assert await open_transport(broker).send(MESSAGE, event) == Sent()
    (message,) = await queued(channel)
    properties = message.header.properties
    assert (properties.message_id, properties.delivery_mode) == (ID, 2)
    assert properties.content_type == "application/cloudevents+json; charset=UTF-8"
    assert properties.headers == {"traceparent": "00-1"}
    assert message.routing_key == "order.placed"
    envelope = json.loads(message.body)
    assert (envelope["id"], envelope["data"]) == (ID, {"order_id": 7})


async def test_nothing_is_handed_over_if_the_gate_is_closed_after_connecting(
    broker: Broker, channel: AbstractChannel, open_transport: Open
) -> None:
    transport = open_transport(broker)
    with closed_gate() as asked:
        assert isinstance(await transport.send(MESSAGE, EVENT), Snooze)
    assert (asked, await queued(channel)) == ([None], [])


async def test_the_key_is_the_routing_key_and_a_queue_can_be_named(
    broker: Broker, channel: AbstractChannel, open_transport: Open
) -> None:
    transport = open_transport(broker)
    assert await transport.send(outgoing(destination="rabbitmq:orders"), CloudEvent(1, key="order.paid")) == Sent()
    assert await transport.send(outgoing(destination="rabbitmq:/placed"), EVENT) == Sent()
    assert [message.routing_key for message in await queued(channel)] == ["order.paid", "placed"]


async def test_many_at_once_are_all_confirmed(broker: Broker, channel: AbstractChannel, open_transport: Open) -> None:
    transport = open_transport(broker)
    messages = [outgoing(message_id=number, destination=MESSAGE.destination) for number in range(100)]
    assert await asyncio.gather(*(transport.send(message, EVENT) for message in messages)) == [Sent()] * 100
    assert len(await queued(channel)) == 100


async def test_an_event_that_no_queue_accepts_is_unavailable(
    broker: Broker, channel: AbstractChannel, open_transport: Open
) -> None:
    transport = open_transport(broker)
    lost = outgoing(destination="rabbitmq:orders/invoice.paid")
    said = refusal_of(await transport.send(lost, EVENT))
    assert said == ("rabbitmq:exchange orders routing key invoice.paid: no queue for the routing key 'invoice.paid'")
    said = refusal_of(await transport.send(outgoing(destination="rabbitmq:/missing"), EVENT))
    assert said == "rabbitmq:queue missing: no queue for the routing key 'missing'"
    assert await transport.send(MESSAGE, EVENT) == Sent()


async def test_a_missing_exchange_is_unavailable_and_does_not_disturb_others(
    broker: Broker, channel: AbstractChannel, open_transport: Open
) -> None:
    transport = open_transport(broker)
    missing = [outgoing(message_id=number, destination=f"rabbitmq:missing{number % 3}/a") for number in range(30)]
    good = [outgoing(message_id=number, destination=MESSAGE.destination) for number in range(30)]
    outcomes = await asyncio.gather(
        *(transport.send(message, EVENT) for pair in zip(missing, good, strict=True) for message in pair)
    )
    assert outcomes[1::2] == [Sent()] * 30
    for number, outcome in enumerate(outcomes[::2]):
        name = f"missing{number % 3}"
        assert refusal_of(outcome).startswith(f"rabbitmq:exchange {name}: exchange '{name}': ")
        assert f"NOT_FOUND - no exchange '{name}'" in refusal_of(outcome)


async def test_a_deleted_and_recreated_exchange_is_found_again(
    broker: Broker, channel: AbstractChannel, open_transport: Open
) -> None:
    transport = open_transport(broker)
    assert await transport.send(MESSAGE, EVENT) == Sent()
    await channel.exchange_delete("orders")
    assert refusal_of(await transport.send(MESSAGE, EVENT)).startswith("rabbitmq:exchange orders: publish: ")
    await channel.exchange_declare("orders", exchange_type="topic")
    await channel.queue_bind("placed", "orders", "order.#")
    assert await transport.send(MESSAGE, EVENT) == Sent()


async def test_a_missing_permission_is_unavailable(
    broker: Broker, channel: AbstractChannel, open_transport: Open
) -> None:
    reader, placer = (open_transport(url_of(broker.port, user)) for user in ("reader", "placer"))
    said = refusal_of(await reader.send(MESSAGE, EVENT))
    assert said.startswith("rabbitmq:exchange orders: publish: ")
    assert "ACCESS_REFUSED" in said
    said = refusal_of(await placer.send(outgoing(destination="rabbitmq:orders/order.paid"), EVENT))
    assert said.startswith("rabbitmq:exchange orders routing key order.paid: publish: ")
    assert "ACCESS_REFUSED" in said
    assert await queued(channel) == []
    assert await placer.send(MESSAGE, EVENT) == Sent()


async def test_a_full_queue_is_transient(broker: Broker, channel: AbstractChannel, open_transport: Open) -> None:
    await channel.queue_declare("full", arguments={"x-max-length": 1, "x-overflow": "reject-publish"})
    transport, message = open_transport(broker), outgoing(destination="rabbitmq:/full")
    assert await transport.send(message, EVENT) == Sent()
    assert error_of(await transport.send(message, EVENT), Transient) == "publish: refused by a queue (nack)"
    await channel.queue_delete("full")


async def test_an_oversized_event_is_permanent_and_does_not_disturb_others(
    broker: Broker, channel: AbstractChannel, open_transport: Open
) -> None:
    transport = open_transport(broker)
    huge, large = CloudEvent("x" * RABBITMQ_MAX_BYTES), CloudEvent("x" * (RABBITMQ_MAX_BYTES - 10_000))
    outcomes = await asyncio.gather(*(transport.send(MESSAGE, event) for event in (EVENT, huge, EVENT, large, EVENT)))
    assert "message size" in error_of(outcomes.pop(1), Permanent)
    assert outcomes == [Sent()] * 4


async def test_refused_credentials_cost_no_attempt_and_are_never_shown(
    broker: Broker, open_transport: Open, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    quoted = CANARY.replace("/", "%2F")
    kinds: dict[int, type[Transient | Unavailable]] = {broker.port: Unavailable, free_port(): Transient}
    for port, kind in kinds.items():
        error = error_of(await open_transport(url_of(port, password=quoted)).send(MESSAGE, EVENT), kind)
        assert error.startswith("connect: ")
        for text in (CANARY, quoted):
            assert text not in caplog.text + error


@pytest.mark.slow
async def test_a_repetition_after_a_lost_confirmation_has_the_same_id(
    broker: Broker, channel: AbstractChannel, open_transport: Open
) -> None:
    transport = open_transport(broker, broker_timeout_seconds=2)
    assert await transport.send(outgoing(message_id=1, destination=MESSAGE.destination), EVENT) == Sent()
    with broker.frozen():
        error = error_of(await transport.send(MESSAGE, EVENT), Transient)
    assert error == "outcome unknown: no acknowledgement: no answer within 2 s"
    again = outgoing(destination=MESSAGE.destination, attempt_count=2)
    assert await transport.send(again, EVENT) == Sent()
    assert [message.header.properties.message_id for message in await queued(channel)][1:] == [ID, ID]


async def test_pending_sends_learn_at_once_that_the_connection_is_gone(
    broker: Broker, channel: AbstractChannel, open_transport: Open
) -> None:
    forwarder = Forwarder(broker.port)
    await forwarder.listen()
    transport = open_transport(url_of(forwarder.port), broker_timeout_seconds=600)
    assert await transport.send(MESSAGE, EVENT) == Sent()
    with broker.frozen():
        sending = asyncio.create_task(transport.send(MESSAGE, EVENT))
        await asyncio.sleep(0)  # It publishes on the existing channel, and waits.
        await forwarder.cut()
        async with asyncio.timeout(30):
            assert error_of(await sending, Transient).startswith("outcome unknown: ")


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("//host/orders", "names a server"),
        ("/", "names neither an exchange nor a queue"),
        ("orders/a%0Ab", "contains CR, LF or NUL"),
        ("orders/" + "x" * 256, "bytes are more than 255"),
    ],
)
async def test_an_invalid_name_is_permanent_before_any_connection(open_transport: Open, name: str, error: str) -> None:
    transport = open_transport(url_of(1))
    said = error_of(await transport.send(outgoing(destination=f"rabbitmq:{name}"), EVENT), Permanent)
    assert said.startswith("destination: ")
    assert error in said


async def test_with_tls_nothing_is_sent_in_plain_text(
    tls_broker: TlsBroker, channel: AbstractChannel, open_transport: Open
) -> None:
    async with forwarded(tls_broker.tls_port) as forwarder:
        transport = open_transport(tls_url_of(forwarder.port), rabbitmq_ca_file=tls_broker.certificate.ca_file)
        assert await transport.send(MESSAGE, CloudEvent(SECRET)) == Sent()
    (message,) = await queued(channel)
    assert json.loads(message.body)["data"] == SECRET
    for text in (CANARY, SECRET):
        assert text.encode() not in forwarder.said


@pytest.mark.parametrize(("host", "is_tls", "is_known", "error"), TLS_REFUSALS)
async def test_a_server_with_a_wrong_certificate_gets_nothing(
    tls_broker: TlsBroker,
    channel: AbstractChannel,
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
        url = tls_url_of(forwarder.port, host) + "?no_verify_ssl=1"  # Options that the client itself would accept.
        outcome = await open_transport(url, rabbitmq_ca_file=ca_file).send(MESSAGE, CloudEvent(SECRET))
    assert_refused(outcome, f"connect: {error or 'TLS: '}", {CANARY, SECRET}, caplog.text, forwarder)
    assert await queued(channel) == []


@pytest.mark.parametrize(
    ("broken", "breaker"),
    [
        ("rabbitmq:invoices/invoice.paid", "rabbitmq:exchange invoices"),
        ("rabbitmq:orders/invoice.paid", "rabbitmq:exchange orders routing key invoice.paid"),
    ],
)
async def test_messages_wait_until_their_exchange_and_a_queue_exist(
    broker: Broker, channel: AbstractChannel, dsn: str, db: psycopg.Connection, broken: str, breaker: str
) -> None:
    exchange = broken.partition(":")[2].partition("/")[0]
    async with target_repaired(
        dsn, db, broken=broken, working=MESSAGE.destination or "", breakers={breaker}, rabbitmq_url=url_of(broker.port)
    ):
        await channel.exchange_declare(exchange, exchange_type="topic")
        await channel.queue_bind("placed", exchange, "#")
    assert len(await queued(channel)) == 40
    await channel.exchange_delete(exchange)


async def test_a_worker_delivers_when_the_server_is_back(
    broker: Broker, channel: AbstractChannel, dsn: str, db: psycopg.Connection
) -> None:
    forwarder = Forwarder(broker.port)
    outbox = outbox_with(dsn, rabbitmq_url=url_of(forwarder.port))
    message_id = enqueue(db, payload={"order_id": 7}, destination=MESSAGE.destination)
    await Worker(outbox).run_once()
    assert state_of(db, message_id) == "pending"
    await forwarder.listen()
    make_due(db, message_id)
    wrong = enqueue(db, destination="rabbitmq:/")
    await Worker(outbox).run_once()
    await forwarder.cut()
    assert (state_of(db, message_id), state_of(db, wrong)) == ("sent", "failed")
    ((number, outcome, error),) = attempts_of(db, message_id)
    assert (number, outcome) == (1, "retry")
    assert (error or "").startswith("connect: ")
    (message,) = await queued(channel)
    assert (message.header.properties.message_id or "").startswith(f"{message_id}-")


@pytest.mark.parametrize(
    ("url", "error"),
    [
        (None, "set PGOUTBOX_RABBITMQ_URL"),
        (f"http://:{CANARY}@host", r"PGOUTBOX_RABBITMQ_URL=\(hidden\): is not a URL"),
    ],
)
def test_an_unusable_setting_is_refused_by_name_at_the_start(url: str | None, error: str) -> None:
    with pytest.raises(ConfigurationError, match=error):
        RabbitMQTransport(settings_with(rabbitmq_url=url))
