"""Tests events to a real RabbitMQ: confirmations, returned messages, and the effect of one refusal on others."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, ClassVar
from urllib.parse import quote

import aiormq
import pytest

from pgoutbox.message import Permanent, Sent, Transient
from pgoutbox.transports.brokers.events import CloudEvent
from pgoutbox.transports.brokers.rabbitmq import RabbitMQTransport
from tests.support.brokers import (
    HOST,
    RABBITMQ_MAX_BYTES,
    Broker,
    Forwarder,
    TlsBroker,
    rabbitmq_server,
    target_repaired,
)
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
    from aiormq.abc import AbstractChannel, DeliveredMessage

    from pgoutbox import Settings
    from tests.transports.contract import Opened

    Open = Callable[..., RabbitMQTransport]

pytestmark = pytest.mark.slow

MESSAGE = outgoing(destination="rabbitmq:orders/order.placed")


@pytest.fixture(scope="module")
def tls_broker() -> Iterator[TlsBroker]:
    with rabbitmq_server() as broker:
        yield broker


@pytest.fixture(scope="module")
def broker(tls_broker: TlsBroker) -> Broker:
    return tls_broker.broker


def url_of(port: int, user: str = "app", password: str = "secret") -> str:
    return f"amqp://{user}:{password}@{HOST}:{port}"


@contextlib.asynccontextmanager
async def channel_to(broker: Broker) -> AsyncIterator[AbstractChannel]:
    connection = await aiormq.connect(url_of(broker.port))
    try:
        yield await connection.channel()
    finally:
        await connection.close()


@pytest.fixture
async def channel(broker: Broker) -> AsyncIterator[AbstractChannel]:
    """Open a channel for checks of `orders`."""
    async with orders(broker) as channel:
        yield channel


@contextlib.asynccontextmanager
async def orders(broker: Broker) -> AsyncIterator[AbstractChannel]:
    """Create the exchange `orders`, which routes `order.#` to the empty queue `placed`."""
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


class TestContract(TlsContract):
    scheme = "rabbitmq"
    prefix = "cloudEvents:"
    seconds = 10
    lost_seconds = 2
    plain_text_error = "TLS: "
    plain_text_seconds = 10
    invalid: ClassVar[dict[str, str]] = {
        "rabbitmq:/": "names neither an exchange nor a queue",
        "rabbitmq://host/orders": "names a server",
        "rabbitmq:orders/a%0Ab": "contains CR, LF or NUL",
        "rabbitmq:orders/" + "x" * 256: "bytes are more than 255",
    }
    unusable: ClassVar[Sequence[tuple[dict[str, object], str]]] = [
        ({}, "set PGOUTBOX_RABBITMQ_URL"),
        ({"rabbitmq_url": f"http://:{CANARY}@host"}, r"PGOUTBOX_RABBITMQ_URL=\(hidden\): is not a URL"),
    ]

    def transport(self, settings: Settings) -> RabbitMQTransport:
        return RabbitMQTransport(settings)

    def settings(self, port: int, password: str = PASSWORD) -> dict[str, object]:
        return {"rabbitmq_url": f"amqp://app:{quote(password, safe='')}@{HOST}:{port}"}

    @contextlib.asynccontextmanager
    async def target(self, broker: Broker) -> AsyncIterator[Target]:
        async with orders(broker) as channel:

            async def arrived(_: int) -> list[Arrived]:
                found = []
                for message in await queued(channel):
                    properties = message.header.properties
                    headers = {name: str(value) for name, value in (properties.headers or {}).items()}
                    known = properties.message_id or "", properties.content_type or ""
                    found.append(Arrived(*known, headers, message.body))
                return found

            yield Target("rabbitmq:orders/order.placed", arrived)

    def tls_settings(self, port: int, host: str, ca_file: str | None) -> dict[str, object]:
        option = "no_verify_ssl=1"  # The client itself would accept it.
        url = f"amqps://tls:{quote(CANARY, safe='')}@{host}:{port}?{option}"
        return {"rabbitmq_url": url, "rabbitmq_ca_file": ca_file}

    def tls_target(self, tls_broker: TlsBroker) -> contextlib.AbstractAsyncContextManager[Target]:
        return self.target(tls_broker.broker)

    async def test_a_repetition_after_a_lost_answer_has_the_same_id(self, broker: Broker, opened: Opened) -> None:
        await super().test_a_repetition_after_a_lost_answer_has_the_same_id(broker, opened)


async def test_a_message_is_persistent_and_has_the_routing_key(
    broker: Broker, channel: AbstractChannel, open_transport: Open
) -> None:
    assert await open_transport(broker).send(MESSAGE, EVENT) == Sent()
    (message,) = await queued(channel)
    assert (message.header.properties.delivery_mode, message.routing_key) == (2, "order.placed")


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


async def test_pending_sends_learn_at_once_that_the_connection_is_gone(
    broker: Broker, channel: AbstractChannel, open_transport: Open
) -> None:
    forwarder = Forwarder(broker.port)
    await forwarder.listen()
    transport = open_transport(url_of(forwarder.port), broker_timeout_seconds=600)
    assert await transport.send(MESSAGE, EVENT) == Sent()
    await assert_pending_send_fails_at_once(transport, broker, "rabbitmq:orders/order.placed", forwarder.cut)


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
