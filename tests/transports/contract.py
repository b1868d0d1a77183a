"""The contract of the brokers: tests that each of them passes with its real server.

The file of a broker has a subclass named `TestContract`, the fixture `broker`, and for TLS the fixture `tls_broker`.
"""

from __future__ import annotations

import asyncio
import json
import logging
from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from pgoutbox.errors import ConfigurationError
from pgoutbox.message import Permanent, Sent, Snooze, Transient, Unavailable
from pgoutbox.transports.brokers.events import CloudEvent
from pgoutbox.worker import Worker
from tests.support.brokers import (
    TLS_HOST,
    TLS_REFUSALS,
    Broker,
    Forwarder,
    TlsBroker,
    assert_refused,
    forwarded,
    outbox_with,
)
from tests.support.outbox_actions import attempts_of, enqueue, make_due, rows_of, state_of
from tests.support.ports import free_port
from tests.support.sends import closed_gate, closing, error_of, outgoing
from tests.support.settings import settings_with

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
    from contextlib import AbstractAsyncContextManager

    import psycopg

    from pgoutbox import Settings
    from pgoutbox.message import Message, Outcome
    from pgoutbox.transports import Transport

    Opened = Callable[..., Transport]

PASSWORD = "secret"
CANARY = "canary/password"
SECRET = "secret-payload"
EVENT = CloudEvent({"order_id": 7})


@dataclass(frozen=True, slots=True)
class Arrived:
    """An event as a consumer reads it. `headers` are those of the event."""

    id: str
    content_type: str
    headers: dict[str, str]
    body: bytes

    @property
    def envelope(self) -> dict[str, Any]:
        envelope = json.loads(self.body)
        assert isinstance(envelope, dict)
        return envelope


@dataclass(frozen=True, slots=True)
class Target:
    """An empty target on a broker. `arrived` reads its events, and waits for at least so many."""

    destination: str
    arrived: Callable[[int], Awaitable[Sequence[Arrived]]]


class BrokerContract(ABC):
    """Tests without TLS."""

    scheme: ClassVar[str]
    seconds: ClassVar[float] = 5
    lost_seconds: ClassVar[float] = 0.5
    """Time limits of a send, and of a send to a broker that does not answer."""
    refusal: ClassVar[str] = "connect: "
    """The error of a refused password contains it."""
    copies: ClassVar[Collection[int]] = (2,)
    """How often a repeated event may be stored."""
    id_headers: ClassVar[Collection[str]] = ()
    """Headers of every event that have its id, besides the one that `Arrived.id` is read from."""
    prefix: ClassVar[str]
    """The prefix of an attribute's header in binary mode."""
    spelled: ClassVar[dict[str, str]] = {}
    """Headers in binary mode that are not the attributes as they are."""
    invalid: ClassVar[dict[str, str]]
    """Destinations that no broker can have, each with a part of its error."""
    unusable: ClassVar[Sequence[tuple[dict[str, object], str]]]
    """Settings that a worker refuses, each with a pattern of its error."""

    @abstractmethod
    def transport(self, settings: Settings) -> Transport:
        """Create the transport."""

    @abstractmethod
    def settings(self, port: int, password: str = PASSWORD) -> dict[str, object]:
        """Return the settings for a broker without TLS on this port."""

    @abstractmethod
    def target(self, broker: Broker) -> AbstractAsyncContextManager[Target]:
        """Create an empty target, and remove it at the end."""

    def make(self, **given: object) -> Transport:
        usual = {"event_source": "https://club.example.org", "broker_timeout_seconds": self.seconds}
        return self.transport(settings_with(**usual | given))

    @pytest.fixture
    async def opened(self) -> AsyncIterator[Opened]:
        async with closing(self.make) as make_one:
            yield make_one

    async def test_an_event_arrives_with_its_id_headers_and_envelope(self, broker: Broker, opened: Opened) -> None:
        event = CloudEvent({"order_id": 7}, subject="orders/7", headers={"traceparent": "00-1"})
        async with self.target(broker) as target:
            message = outgoing(destination=target.destination)
            assert await opened(**self.settings(broker.port)).send(message, event) == Sent()
            (arrived,) = await target.arrived(1)
        assert arrived.id == message.idempotency_key
        assert arrived.content_type == "application/cloudevents+json; charset=UTF-8"
        assert arrived.headers == {"traceparent": "00-1"} | dict.fromkeys(self.id_headers, arrived.id)
        envelope = arrived.envelope
        assert (envelope["id"], envelope["type"], envelope["subject"]) == (arrived.id, "welcome", "orders/7")
        assert envelope["data"] == {"order_id": 7}

    async def test_in_binary_mode_the_body_is_the_data_and_the_attributes_are_headers(
        self, broker: Broker, opened: Opened
    ) -> None:
        event = CloudEvent(
            {"order_id": 7, "name": "Jürgen"},
            subject="50% ü",
            key="7",
            extensions={"urgent": True, "weight": 3},
            headers={"traceparent": "00-1"},
            mode="binary",
        )
        async with self.target(broker) as target:
            message = outgoing(destination=target.destination)
            assert await opened(**self.settings(broker.port)).send(message, event) == Sent()
            (arrived,) = await target.arrived(1)
        assert arrived.id == message.idempotency_key
        assert arrived.content_type == "application/json"
        assert arrived.body == '{"order_id":7,"name":"Jürgen"}'.encode()
        attributes = {
            "specversion": "1.0",
            "id": message.idempotency_key,
            "source": "https://club.example.org",
            "type": "welcome",
            "time": "2026-03-01T12:00:00Z",
            "subject": "50% ü",
            "partitionkey": "7",
            "urgent": "true",
            "weight": "3",
        }
        headers = {f"{self.prefix}{name}": value for name, value in attributes.items()}
        assert arrived.headers == {"traceparent": "00-1"} | headers | self.spelled

    async def test_nothing_is_handed_over_if_the_gate_is_closed_after_connecting(
        self, broker: Broker, opened: Opened
    ) -> None:
        async with self.target(broker) as target, forwarded(broker.port) as forwarder:
            transport = opened(**self.settings(forwarder.port))
            with closed_gate() as asked:
                outcome = await transport.send(outgoing(destination=target.destination), EVENT)
            assert isinstance(outcome, Snooze)
            assert asked == [None]
            assert forwarder.said
            later = outgoing(message_id=8, destination=target.destination)
            assert await transport.send(later, EVENT) == Sent()
            assert [arrived.id for arrived in await target.arrived(1)] == [later.idempotency_key]

    async def test_an_unreachable_server_is_transient_and_the_password_is_never_shown(
        self, opened: Opened, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.DEBUG)
        transport = opened(**self.settings(free_port(), CANARY) | {"broker_timeout_seconds": 1})
        error = error_of(await transport.send(self._message(), EVENT), Transient)
        assert error.startswith("connect: ")
        _assert_hidden(error + caplog.text)

    async def test_refused_credentials_cost_no_attempt_and_are_never_shown(
        self, broker: Broker, opened: Opened, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.DEBUG)
        transport = opened(**self.settings(broker.port, CANARY))
        error = error_of(await transport.send(self._message(), EVENT), Unavailable)
        assert self.refusal in error
        _assert_hidden(error + caplog.text)

    async def test_a_repetition_after_a_lost_answer_has_the_same_id(self, broker: Broker, opened: Opened) -> None:
        """The client itself repeats nothing."""
        transport = opened(**self.settings(broker.port) | {"broker_timeout_seconds": self.lost_seconds})
        async with self.target(broker) as target:
            first = outgoing(message_id=1, destination=target.destination)
            message = outgoing(destination=target.destination)
            assert await transport.send(first, EVENT) == Sent()
            with broker.frozen():
                error = error_of(await transport.send(message, EVENT), Transient)
            assert error.startswith("outcome unknown: no acknowledgement: ")
            again = outgoing(destination=target.destination, attempt_count=2)
            outcome = await transport.send(again, EVENT)
            if outcome != Sent():  # A client may need longer to notice that the broker is available again.
                outcome = await opened(**self.settings(broker.port)).send(again, EVENT)
            assert outcome == Sent()
            found = Counter(arrived.id for arrived in await target.arrived(2))
        assert found.keys() == {first.idempotency_key, message.idempotency_key}
        assert found[first.idempotency_key] == 1
        assert found[message.idempotency_key] in self.copies

    async def test_an_invalid_destination_is_permanent_before_any_connection(self, opened: Opened) -> None:
        transport = opened(**self.settings(1))
        for destination, error in self.invalid.items():
            said = error_of(await transport.send(outgoing(destination=destination), EVENT), Permanent)
            assert said.startswith("destination: ")
            assert error in said

    async def test_a_worker_delivers_when_the_server_is_back(
        self, broker: Broker, dsn: str, db: psycopg.Connection
    ) -> None:
        forwarder = Forwarder(broker.port)
        outbox = outbox_with(dsn, make=self.transport, **self.settings(forwarder.port))
        async with self.target(broker) as target:
            message_id = enqueue(db, payload={"order_id": 7}, destination=target.destination)
            await Worker(outbox).run_once()
            assert state_of(db, message_id) == "pending"
            wrong, nowhere = enqueue(db, destination=next(iter(self.invalid))), enqueue(db)
            make_due(db, message_id)
            await forwarder.listen()
            try:
                await Worker(outbox).run_once()
            finally:
                await forwarder.cut()
            assert [row.state for row in rows_of(db, message_id, wrong, nowhere)] == ["sent", "failed", "failed"]
            errors = [row.last_error or "" for row in rows_of(db, wrong, nowhere)]
            assert errors[0].startswith("destination: ")
            assert errors[1] == "destination: the message has none, and its CloudEvent needs one"
            ((number, outcome, error),) = attempts_of(db, message_id)
            assert (number, outcome) == (1, "retry")
            assert (error or "").startswith("connect: ")
            (arrived,) = await target.arrived(1)
        assert arrived.id.startswith(f"{message_id}-")
        assert arrived.envelope["data"] == {"order_id": 7}

    def test_an_unusable_setting_is_refused_by_name_at_the_start(self) -> None:
        for given, error in self.unusable:
            with pytest.raises(ConfigurationError, match=error):
                self.make(**given)

    def _message(self) -> Message[object]:
        return outgoing(destination=f"{self.scheme}:orders")


class TlsContract(BrokerContract):
    """Tests with TLS. The user of the broker with TLS has the password `CANARY`."""

    plain_text_error: ClassVar[str] = ""
    """The beginning of the error of a server that does not speak TLS."""
    plain_text_seconds: ClassVar[float] = 5

    @abstractmethod
    def tls_settings(self, port: int, host: str, ca_file: str | None) -> dict[str, object]:
        """Return the settings for a broker with TLS."""

    @abstractmethod
    def tls_target(self, tls_broker: TlsBroker) -> AbstractAsyncContextManager[Target]:
        """Create an empty target on the broker with TLS."""

    def check_plain_text(self, outcome: Outcome, forwarder: Forwarder) -> None:
        """Check more of the outcome at a server without TLS."""

    async def test_with_tls_nothing_is_sent_in_plain_text(self, tls_broker: TlsBroker, opened: Opened) -> None:
        async with self.tls_target(tls_broker) as target, forwarded(tls_broker.tls_port) as forwarder:
            transport = opened(**self.tls_settings(forwarder.port, TLS_HOST, tls_broker.certificate.ca_file))
            assert await transport.send(outgoing(destination=target.destination), CloudEvent(SECRET)) == Sent()
            (arrived,) = await target.arrived(1)
        assert arrived.envelope["data"] == SECRET
        for text in (CANARY, SECRET):
            assert text.encode() not in forwarder.said

    @pytest.mark.parametrize(("host", "is_tls", "is_known", "error"), TLS_REFUSALS)
    async def test_a_server_with_a_wrong_certificate_gets_nothing(
        self,
        tls_broker: TlsBroker,
        opened: Opened,
        caplog: pytest.LogCaptureFixture,
        host: str,
        is_tls: bool,
        is_known: bool,
        error: str,
    ) -> None:
        caplog.set_level(logging.DEBUG)
        port = tls_broker.tls_port if is_tls else tls_broker.plain_port
        async with self.tls_target(tls_broker) as target, forwarded(port) as forwarder:
            given = self.tls_settings(forwarder.port, host, tls_broker.certificate.ca_file if is_known else None)
            given["broker_timeout_seconds"] = self.seconds if is_tls else self.plain_text_seconds
            outcome = await opened(**given).send(outgoing(destination=target.destination), CloudEvent(SECRET))
            assert_refused(
                outcome, f"connect: {error or self.plain_text_error}", {CANARY, SECRET}, caplog.text, forwarder
            )
            if not is_tls:
                self.check_plain_text(outcome, forwarder)
            assert await target.arrived(0) == []


async def assert_pending_send_fails_at_once(
    transport: Transport, broker: Broker, destination: str, end: Callable[[], Awaitable[None]]
) -> None:
    """Assert that a send without an answer ends when `end` has ended its connection."""
    with broker.frozen():
        sending = asyncio.create_task(transport.send(outgoing(destination=destination), EVENT))
        await asyncio.sleep(0)  # One turn of the loop starts the task: it publishes, and waits for the answer.
        await end()
        async with asyncio.timeout(30):
            error = error_of(await sending, Transient)
    assert error.startswith("outcome unknown: ")


def _assert_hidden(text: str) -> None:
    for secret in (CANARY, CANARY.replace("/", "%2F")):
        assert secret not in text
