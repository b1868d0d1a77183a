"""The transport that produces events to Kafka, with acks=all and an idempotent producer.

librdkafka has its own threads and queue: it batches concurrent sends, and repeats a request within the time limit
without storing a record twice. After that only the retry policy repeats; the header `ce_id`, the same at every attempt,
lets the consumer recognise it.
"""

from __future__ import annotations

import asyncio
import re
import threading
from logging import getLogger
from typing import TYPE_CHECKING, Any, Final

from pgoutbox.errors import ConfigurationError, MissingExtraError
from pgoutbox.message import Message, Outcome, Permanent, SendFailure, Sent, Transient, Unavailable
from pgoutbox.transports import pass_gate
from pgoutbox.transports.brokers.broker import MAX_ANSWER_BYTES, BrokerTransport
from pgoutbox.transports.brokers.events import RenderedEvent, parse_name
from pgoutbox.transports.tls import client_context

try:
    from confluent_kafka import KafkaError, KafkaException, Producer
except ImportError:
    raise MissingExtraError("the Kafka transport", "kafka") from None

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pgoutbox.settings import KafkaSettings, Settings

__all__ = ["KafkaTransport"]

# Errors of librdkafka about its connections.
_client_logger = getLogger("confluent_kafka")

_SERVERS: Final = re.compile(r"[^\s,:]+:\d{1,5}(?:,[^\s,:]+:\d{1,5})*|\[[0-9a-fA-F:]+\]:\d{1,5}")
_TOPIC: Final = re.compile(r"[A-Za-z0-9._-]{1,249}")
_POLL_SECONDS: Final = 0.2
# How long the first query for a broker waits, and the longest one, which a close waits for.
_ASK_SECONDS: Final = 0.5
_MAX_ASK_SECONDS: Final = 4.0
# Errors after which the record may have been appended.
_UNKNOWN_OUTCOMES: Final = (
    "_MSG_TIMED_OUT", "_TIMED_OUT", "_TRANSPORT", "_PURGE_INFLIGHT", "_DESTROY", "REQUEST_TIMED_OUT",
    "NETWORK_EXCEPTION", "NOT_ENOUGH_REPLICAS_AFTER_APPEND",
)  # fmt: skip
_REFUSED_TOPIC: Final = ("_UNKNOWN_TOPIC", "UNKNOWN_TOPIC_OR_PART", "TOPIC_AUTHORIZATION_FAILED")


class KafkaTransport(BrokerTransport[str, "_Link"]):
    """Produces a `CloudEvent` to the topic that the destination names, `kafka:orders`.

    The event's `key` is the key of the record, and its partition is the one that Java's clients choose for that key.
    The headers `ce_id` and `content-type` are added to the event's own, and in binary mode the attributes, with the
    prefix `ce_`. The producer starts with the first send, and reconnects by itself. A cancelled send, or one after its
    time limit, may still have been produced. `options` are further settings of librdkafka.

    | Kafka | outcome |
    |---|---|
    | acknowledges: all in-sync replicas have the record | sent |
    | cannot be reached, or has a wrong certificate | transient |
    | refuses the credentials | unavailable |
    | does not acknowledge in time | transient, "outcome unknown" |
    | has no such topic, or does not allow it to this user | unavailable: this topic |
    | has too few replicas, or refuses a batch as too large for the topic | transient |
    | the record is larger than the client's `message.max.bytes` (1 MB) | permanent |
    | calls the topic's name or the record invalid | permanent |

    Raises `ConfigurationError` when a setting is missing or unusable, `MissingExtraError` without confluent-kafka.
    """

    schemes: tuple[str, ...] = ("kafka",)
    _kind: str = "topic"
    _refusals: tuple[type[Exception], ...] = (PermissionError,)

    def __init__(self, settings: Settings, *, options: Mapping[str, str | int | bool] | None = None) -> None:
        super().__init__(settings)
        self._configuration = _configuration(settings.kafka, self._seconds) | dict(options or {})
        password = settings.kafka.password
        self._secrets = (password.get_secret_value(),) if password is not None else ()
        self._link: _Link | None = None

    async def _connected(self, target: str | None) -> _Link:
        if self._link is None:
            try:
                self._link = _Link(self._configuration, target)
            except KafkaException as refused:  # An invalid option.
                raise ConnectionError(refused.args[0].str()) from refused
        link = self._link
        try:
            # A queued record may have been sent, so the producer gets no record before it has seen a broker.
            async with asyncio.timeout(self._seconds):
                await link.reached.wait()
        except TimeoutError:
            error = PermissionError if link.is_refused else ConnectionError
            raise error(f"no broker within {self._seconds:g} s: {link.last_error or 'no answer'}") from None
        return link

    async def aclose(self) -> None:
        """Stop the producer and drop its queue, which has only records of cancelled sends."""
        link, self._link = self._link, None
        if link is not None:
            await asyncio.to_thread(link.close)

    def _target(self, message: Message[object], key: str | None) -> str:  # noqa: ARG002 - it selects the partition
        topic = parse_name(message)
        if not _TOPIC.fullmatch(topic) or topic in {".", ".."}:
            raise Permanent("destination: a topic's name is 1 to 249 letters, digits, dots, underscores and hyphens")
        return topic

    async def _publish(self, connection: _Link, target: str, event: RenderedEvent) -> Outcome:
        headers = {**event.headers_with("ce_"), "ce_id": event.id, "content-type": event.content_type}
        await pass_gate()
        try:
            reported = connection.produce(target, event, headers)
        except BufferError:
            return Transient("produce: the producer's queue is full")
        except KafkaException as refused:
            return self._refusal(target, refused.args[0], is_local=True)
        error = await reported
        if error is None:
            return Sent()
        if error.fatal() and self._link is connection:  # This producer is unusable; the next send starts another.
            await self.aclose()
        return self._refusal(target, error, last_error=connection.last_error)

    def _refusal(
        self, topic: str, error: KafkaError, *, is_local: bool = False, last_error: str | None = None
    ) -> Outcome:
        """Return the outcome of an error. `is_local`: the producer refused it. `last_error`: of its connections."""
        code, reason = error.code(), self._one_line(error.str())
        if any(code == getattr(KafkaError, name) for name in _UNKNOWN_OUTCOMES):
            why = f" ({self._one_line(last_error)})" if last_error else ""
            return SendFailure(f"outcome unknown: no acknowledgement: {reason}{why}", outage=True, unknown=True)
        # A broker reports this for a whole batch, which may contain other records.
        if code == KafkaError.MSG_SIZE_TOO_LARGE and is_local:
            return Permanent(f"event.data: {reason}")
        if code in (KafkaError.TOPIC_EXCEPTION, KafkaError.INVALID_RECORD):
            return Permanent(f"produce: {reason}")
        if any(code == getattr(KafkaError, name) for name in _REFUSED_TOPIC):
            return Unavailable(f"produce: {reason}", breaker=self._target_key(topic))
        return Transient(f"produce: {reason}")


class _Link:
    """A producer, and the thread in which it reports the delivery of each record."""

    def __init__(self, configuration: Mapping[str, str | int | bool], topic: str | None) -> None:
        self.reached = asyncio.Event()
        """Set permanently after a broker has answered a query about this topic, or about all topics."""
        self.last_error: str | None = None
        self.is_refused = False
        """Whether a broker refused the credentials in its last error."""
        self._loop = asyncio.get_running_loop()
        self._is_closing = False
        self._topic = topic
        self._producer = Producer({**configuration, "error_cb": self._note_error}, logger=_client_logger)
        self._thread = threading.Thread(target=self._poll, name="pgoutbox kafka", daemon=True)
        self._thread.start()

    def produce(
        self, topic: str, event: RenderedEvent, headers: Mapping[str, str]
    ) -> asyncio.Future[KafkaError | None]:
        """Queue the record in the producer; the future gets the error of its delivery, or None."""
        reported: asyncio.Future[KafkaError | None] = self._loop.create_future()

        def report(error: KafkaError | None, _: object) -> None:
            self._loop.call_soon_threadsafe(_set, reported, error)

        self._producer.produce(
            topic,
            event.content,
            key=None if event.key is None else event.key.encode(),
            headers={name: value.encode() for name, value in headers.items()},
            on_delivery=report,
        )
        return reported

    def close(self) -> None:
        """Drop the queue and stop. Blocks for a moment."""
        self._producer.purge()
        self._is_closing = True
        self._thread.join()

    def _poll(self) -> None:
        is_reached, seconds = False, _ASK_SECONDS
        while not self._is_closing:
            if not is_reached:
                if is_reached := self._has_broker(seconds):
                    self._loop.call_soon_threadsafe(self.reached.set)
                seconds = min(2 * seconds, _MAX_ASK_SECONDS)  # The broker may be far away, or its answer long.
            self._producer.poll(_POLL_SECONDS)
        self._producer.poll(0)

    def _has_broker(self, seconds: float) -> bool:
        try:
            self._producer.list_topics(self._topic, timeout=seconds)
        except KafkaException:  # The callback reports errors of the connections.
            return False
        return True

    def _note_error(self, error: KafkaError) -> None:
        if error.code() != KafkaError._ALL_BROKERS_DOWN or self.last_error is None:  # It does not give the reason.
            self.last_error = error.str()
            self.is_refused = error.code() in (KafkaError._AUTHENTICATION, KafkaError.SASL_AUTHENTICATION_FAILED)


def _set(reported: asyncio.Future[KafkaError | None], error: KafkaError | None) -> None:
    if not reported.done():
        reported.set_result(error)


def _configuration(settings: KafkaSettings, timeout_seconds: float) -> dict[str, Any]:
    if settings.servers is None:
        raise ConfigurationError("no Kafka brokers given: set PGOUTBOX_KAFKA_SERVERS")
    servers = settings.servers.replace(" ", "")
    if not _SERVERS.fullmatch(servers):
        raise ConfigurationError(
            f"PGOUTBOX_KAFKA_SERVERS={settings.servers!r}: must be host:port, or several separated by commas"
        )
    milliseconds = int(timeout_seconds * 1_000)
    configuration: dict[str, Any] = {
        "bootstrap.servers": servers,
        "security.protocol": "SSL" if settings.security == "tls" else "PLAINTEXT",
        "enable.idempotence": True,
        "acks": "all",
        "enable.ssl.certificate.verification": True,
        "ssl.endpoint.identification.algorithm": "https",
        "message.timeout.ms": milliseconds,
        "topic.metadata.propagation.max.ms": milliseconds // 2,
        "socket.connection.setup.timeout.ms": max(1_000, milliseconds),
        "receive.message.max.bytes": MAX_ANSWER_BYTES * 10,  # The topics of a large cluster are one answer.
        "reconnect.backoff.ms": 400,  # While it looks for a broker, it connects at this interval.
        "reconnect.backoff.max.ms": 1_000,
        # The default of the Java clients, so that all producers of a topic agree on the partition of a key.
        "partitioner": "murmur2_random",
    }
    # librdkafka makes contexts of its own; this one checks the file.
    client_context("KAFKA", settings.ca_file, "SECURITY", "tls", has_tls=settings.security == "tls")
    if settings.ca_file is not None:
        configuration["ssl.ca.location"] = settings.ca_file
    if settings.username is None:
        return configuration
    if settings.password is None:
        raise ConfigurationError("PGOUTBOX_KAFKA_USERNAME is set, PGOUTBOX_KAFKA_PASSWORD is not")
    if settings.security == "none" and settings.mechanism == "PLAIN":
        raise ConfigurationError(
            "PGOUTBOX_KAFKA_SECURITY=none would send PGOUTBOX_KAFKA_PASSWORD in plain text; use tls, or SCRAM"
        )
    return configuration | {
        "security.protocol": "SASL_SSL" if settings.security == "tls" else "SASL_PLAINTEXT",
        "sasl.mechanism": settings.mechanism,
        "sasl.username": settings.username,
        "sasl.password": settings.password.get_secret_value(),
    }
