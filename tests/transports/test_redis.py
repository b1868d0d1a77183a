"""Tests events to streams of a real Redis: deliveries, refusals, and lost answers."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import quote

import pytest
import redis

from pgoutbox.errors import ConfigurationError
from pgoutbox.message import SendFailure, Sent, Transient, Unavailable
from pgoutbox.transports.brokers.redis_streams import RedisTransport
from pgoutbox.worker import Worker
from tests.support.brokers import (
    HOST,
    TLS_HOST,
    Broker,
    TlsBroker,
    outbox_with,
    redis_server,
    target_repaired,
    tls_redis_server,
)
from tests.support.outbox_actions import attempts_of, enqueue, make_due, rows_of
from tests.support.ports import free_port
from tests.support.sends import closing, error_of, outgoing, refusal_of
from tests.support.settings import settings_with
from tests.transports.contract import CANARY, EVENT, Arrived, Target, TlsContract

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Sequence

    import psycopg

    from pgoutbox import Settings
    from pgoutbox.message import Outcome
    from tests.support.brokers import Forwarder

    Open = Callable[..., RedisTransport]

QUOTED = quote(CANARY, safe="")
MESSAGE = outgoing(destination="redis:orders")
ID = MESSAGE.idempotency_key.encode()


@pytest.fixture(scope="module")
def shared_broker() -> Iterator[Broker]:
    with redis_server() as broker:
        yield broker


@pytest.fixture
def broker(shared_broker: Broker) -> Broker:
    """Provide the Redis of this module, emptied."""
    with client_of(shared_broker) as client:
        client.flushall()
    return shared_broker


def client_of(broker: Broker) -> redis.Redis:
    return redis.Redis(HOST, broker.port)


def entries(broker: Broker, stream: str = "orders") -> list[dict[bytes, bytes]]:
    with client_of(broker) as client:
        return [fields for _, fields in client.xrange(stream)]


@pytest.fixture
async def open_transport() -> AsyncIterator[Open]:
    def make(url: Broker | str, *, connection_count: int = 10, **overrides: object) -> RedisTransport:
        given: dict[str, object] = {
            "redis_url": url if isinstance(url, str) else f"redis://{HOST}:{url.port}",
            "event_source": "https://club.example.org",
            "broker_timeout_seconds": 5,
        }
        return RedisTransport(settings_with(**(given | overrides)), connection_count=connection_count)

    async with closing(make) as make_one:
        yield make_one


class TestContract(TlsContract):
    scheme = "redis"
    refusal = "connect: invalid username-password pair"
    prefix = "ce-"
    plain_text_seconds = 0.5
    invalid: ClassVar[dict[str, str]] = {"redis://elsewhere/orders": "names a server; its address belongs into"}
    unusable: ClassVar[Sequence[tuple[dict[str, object], str]]] = [
        ({}, "set PGOUTBOX_REDIS_URL"),
        ({"redis_url": f"http://:{QUOTED}@host"}, r"PGOUTBOX_REDIS_URL=\(hidden\): is not a URL"),
    ]

    def transport(self, settings: Settings) -> RedisTransport:
        # Each send waits for the connection of the one before, also after a lost answer.
        return RedisTransport(settings, connection_count=1)

    def settings(self, port: int, password: str | None = None) -> dict[str, object]:
        user = "" if password is None else f"app:{quote(password, safe='')}@"
        return {"redis_url": f"redis://{user}{HOST}:{port}"}

    @contextlib.asynccontextmanager
    async def target(self, broker: Broker) -> AsyncIterator[Target]:
        with client_of(broker) as client:
            client.delete("orders")

        async def arrived(_: int) -> list[Arrived]:
            return [
                Arrived(
                    entry.pop(b"id").decode(),
                    entry.pop(b"content-type").decode(),
                    body=entry.pop(b"data"),
                    headers={name.decode(): value.decode() for name, value in entry.items()},
                )
                for entry in entries(broker)
            ]

        yield Target("redis:orders", arrived)

    def tls_settings(self, port: int, host: str, ca_file: str | None) -> dict[str, object]:
        return {"redis_url": f"rediss://app:{QUOTED}@{host}:{port}", "redis_ca_file": ca_file}

    def tls_target(self, tls_broker: TlsBroker) -> contextlib.AbstractAsyncContextManager[Target]:
        return self.target(tls_broker.broker)

    def check_plain_text(self, outcome: Outcome, forwarder: Forwarder) -> None:
        # There may be an answer or not, depending on a line end among a handshake's random bytes.
        assert error_of(outcome, Transient).endswith("; does the server speak TLS on this port?")


async def test_a_stream_name_may_contain_colons_and_spaces(broker: Broker, open_transport: Open) -> None:
    message = outgoing(destination="redis:shop:orders%20%C3%BC")
    assert await open_transport(broker).send(message, EVENT) == Sent()
    assert len(entries(broker, "shop:orders ü")) == 1


async def test_connections_are_reused_and_limited(broker: Broker, open_transport: Open) -> None:
    transport = open_transport(broker, connection_count=3)
    outcomes = await asyncio.gather(
        *(transport.send(outgoing(message_id=number, destination="redis:orders"), EVENT) for number in range(100))
    )
    assert outcomes == [Sent()] * 100
    assert len(entries(broker)) == 100
    with client_of(broker) as client:
        assert len(client.client_list()) == 3 + 1


async def test_a_required_password_that_is_not_set_costs_no_attempt(broker: Broker, open_transport: Open) -> None:
    with client_of(broker) as client:
        client.execute_command("CONFIG", "SET", "requirepass", "secret")
        try:
            outcome = await open_transport(f"redis://{HOST}:{broker.port}").send(MESSAGE, EVENT)
        finally:
            client.execute_command("CONFIG", "SET", "requirepass", "")
    assert error_of(outcome, Unavailable) == "XADD: Authentication required."


async def test_a_key_that_is_not_a_stream_is_unavailable(broker: Broker, open_transport: Open) -> None:
    with client_of(broker) as client:
        client.set("orders", "taken")
    transport = open_transport(broker, connection_count=1)
    assert refusal_of(await transport.send(MESSAGE, EVENT)).startswith("redis:stream orders: XADD: WRONGTYPE")
    assert await transport.send(outgoing(destination="redis:others"), EVENT) == Sent()


async def test_missing_rights_are_unavailable_for_the_stream_or_for_all(broker: Broker, open_transport: Open) -> None:
    with client_of(broker) as client:
        client.execute_command("ACL", "SETUSER", "reader", "on", ">secret", "~*", "+@all", "-xadd")
        client.execute_command("ACL", "SETUSER", "cashier", "on", ">secret", "~invoices", "+@all")
    reader = open_transport(f"redis://reader:secret@{HOST}:{broker.port}")
    assert refusal_of(await reader.send(MESSAGE, EVENT)).startswith("None: XADD: this user has no permissions to run")
    cashier = open_transport(f"redis://cashier:secret@{HOST}:{broker.port}")
    assert refusal_of(await cashier.send(MESSAGE, EVENT)).startswith("redis:stream orders: XADD: ")
    assert await cashier.send(outgoing(destination="redis:invoices"), EVENT) == Sent()
    assert entries(broker) == []


async def test_a_replica_is_unavailable_for_all_streams(broker: Broker, open_transport: Open) -> None:
    with client_of(broker) as client:
        client.execute_command("REPLICAOF", HOST, str(free_port()))
        try:
            outcome = await open_transport(broker).send(MESSAGE, EVENT)
        finally:
            client.execute_command("REPLICAOF", "NO", "ONE")
    assert refusal_of(outcome) == "None: XADD: You can't write against a read only replica."


async def test_a_server_without_memory_is_an_outage(broker: Broker, open_transport: Open) -> None:
    with client_of(broker) as client:
        client.config_set("maxmemory", "1")
        try:
            outcome = await open_transport(broker).send(MESSAGE, EVENT)
        finally:
            client.config_set("maxmemory", "0")
    assert error_of(outcome, Transient).startswith("XADD: command not allowed when used memory")
    assert isinstance(outcome, SendFailure)
    assert (outcome.outage, outcome.unknown) == (True, False)
    assert entries(broker) == []


async def test_a_cancelled_send_does_not_leave_its_answer_to_the_next(broker: Broker, open_transport: Open) -> None:
    transport = open_transport(broker, connection_count=1)
    with client_of(broker) as client:
        client.set("text", "taken")
    assert await transport.send(MESSAGE, EVENT) == Sent()
    with broker.frozen():
        cancelled = asyncio.create_task(transport.send(MESSAGE, EVENT))
        await turns_of_the_loop()
        cancelled.cancel()
        refused = asyncio.create_task(transport.send(outgoing(destination="redis:text"), EVENT))
        await turns_of_the_loop()
    assert isinstance(await refused, Unavailable)
    assert cancelled.cancelled()


async def turns_of_the_loop() -> None:
    """Let a send run as far as it can without an answer."""
    for _ in range(50):
        await asyncio.sleep(0)


async def test_a_broken_idle_connection_is_replaced(broker: Broker, open_transport: Open) -> None:
    transport = open_transport(broker, connection_count=1)
    assert await transport.send(MESSAGE, EVENT) == Sent()
    with client_of(broker) as client:
        client.client_kill_filter(_type="normal", skipme=True)
    # Another dialogue runs the loop often enough for the first connection to detect its end.
    assert await open_transport(broker).send(MESSAGE, EVENT) == Sent()
    assert await transport.send(MESSAGE, EVENT) == Sent()
    assert len(entries(broker)) == 3


@pytest.fixture(scope="module")
def tls_broker() -> Iterator[TlsBroker]:
    with tls_redis_server() as broker:
        with client_of(broker.broker) as client:
            client.execute_command("ACL", "SETUSER", "app", "on", f">{CANARY}", "~*", "+@all")
        yield broker


@pytest.mark.parametrize("query", ["ssl_cert_reqs=none", "ssl_cert_reqs=optional", "ssl_check_hostname=false"])
def test_a_url_cannot_turn_the_verification_off(query: str) -> None:
    with pytest.raises(ConfigurationError, match=r"PGOUTBOX_REDIS_URL=\(hidden\): turns the verification"):
        RedisTransport(settings_with(redis_url=f"rediss://:{QUOTED}@host?{query}"))


@pytest.mark.slow
async def test_operator_errors_cost_messages_no_attempts(
    tls_broker: TlsBroker, dsn: str, db: psycopg.Connection
) -> None:
    wrong: dict[str, Any] = {
        "redis_url": f"rediss://app:{QUOTED}@{TLS_HOST}:{tls_broker.tls_port}",
        "breaker_failures": 2,
        "concurrency": 1,
    }
    ids = [enqueue(db, destination="redis:mended", max_attempts=3) for _ in range(10)]
    await Worker(outbox_with(dsn, **wrong)).run_once()
    rows = rows_of(db, *ids)
    assert {row.state for row in rows} == {"pending"}
    # Only the messages that opened the breaker have used one up.
    assert sorted(row.max_attempts - row.attempt_count for row in rows) == [2] + [3] * 9
    texts = {error or "" for message_id in ids for _, _, error in attempts_of(db, message_id)}
    assert any("the server's certificate is refused: " in text for text in texts)
    assert not any(secret in text for secret in (CANARY, QUOTED) for text in texts)
    db.execute("UPDATE pgoutbox.breaker SET retry_at = now()")
    for _ in range(2):  # One message is the probe; the others follow.
        for message_id in ids:
            make_due(db, message_id)
        await Worker(outbox_with(dsn, **wrong, redis_ca_file=tls_broker.certificate.ca_file)).run_once()
    assert {row.state for row in rows_of(db, *ids)} == {"sent"}
    assert len(entries(tls_broker.broker, "mended")) == len(ids)


@pytest.mark.slow
async def test_messages_wait_until_the_key_is_a_stream(broker: Broker, dsn: str, db: psycopg.Connection) -> None:
    with client_of(broker) as client:
        client.set("taken", "by another application")
        async with target_repaired(
            dsn,
            db,
            broken="redis:taken",
            working="redis:orders",
            breakers={"redis:stream taken"},
            redis_url=f"redis://{HOST}:{broker.port}",
        ):
            client.delete("taken")
    assert (len(entries(broker, "taken")), len(entries(broker))) == (20, 20)
