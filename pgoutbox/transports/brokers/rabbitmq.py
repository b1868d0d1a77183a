"""The transport that publishes events to RabbitMQ, with publisher confirms and `mandatory`.

No event is lost silently: RabbitMQ returns an event that no queue accepts, and only a confirmed event counts as sent.
Each event is published once; its `message_id`, the same at every attempt, lets the consumer recognise a repetition.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

from pgoutbox.errors import ConfigurationError, MissingExtraError
from pgoutbox.message import Message, Outcome, Permanent, SendFailure, Sent, Transient, Unavailable
from pgoutbox.text import one_line
from pgoutbox.transports import pass_gate
from pgoutbox.transports.brokers.broker import MAX_ANSWER_BYTES, BrokerTransport, SharedConnection
from pgoutbox.transports.brokers.events import RenderedEvent, check_name, parse_name
from pgoutbox.transports.tls import client_context

try:
    import aiormq
    from aiormq import exceptions as amqp
    from aiormq.connection import TCPTransportFactory, TLSTransportFactory, TransportFactory
    from pamqp.commands import Basic
except ImportError:
    raise MissingExtraError("the RabbitMQ transport", "rabbitmq") from None

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiormq.abc import AbstractChannel, AbstractConnection
    from yarl import URL

    from pgoutbox.settings import Settings

__all__ = ["RabbitMQTransport"]

_PERSISTENT: Final = 2
_REFUSED_CREDENTIALS: Final = (amqp.AuthenticationError, amqp.ConnectionNotAllowed, amqp.ProbableAuthenticationError)
_REFUSED_EXCHANGE: Final = (amqp.ChannelNotFoundEntity, amqp.ChannelAccessRefused)
# Only the text names the routing key that the topic permissions of a user refuse.
_REFUSED_ROUTE: Final = re.compile(r"access to topic '(.*)' in exchange")
# An event larger than the server accepts ends its channel, and must not end other sends on it.
_LARGE_BYTES: Final = 1_000_000


class _Address(NamedTuple):
    exchange: str
    routing_key: str

    @property
    def exchange_breaker(self) -> str:
        return f"rabbitmq:exchange {self.exchange or '(default)'}"

    @property
    def route_breaker(self) -> str:
        if not self.exchange:
            return f"rabbitmq:queue {self.routing_key}"
        return f"{self.exchange_breaker} routing key {self.routing_key or '(none)'}"


class RabbitMQTransport(BrokerTransport[_Address, "AbstractConnection"]):
    """Publishes a `CloudEvent` to the exchange and with the routing key that the destination names,
    `rabbitmq:orders/order.placed`.

    The default routing key is the event's `key`. `rabbitmq:/invoices` is the queue `invoices`, through the default
    exchange. An event is persistent and has the properties `message_id` and `content_type`, and the event's own
    headers. In binary mode the attributes are headers with the prefix `cloudEvents:`. All sends share one connection,
    with a channel for each exchange, because a refusal by RabbitMQ ends the channel. The next send reopens a broken
    connection or channel. With `amqps:` nothing is sent in plain text, and the certificate and its host name are
    verified.

    | RabbitMQ | outcome |
    |---|---|
    | confirms | sent |
    | cannot be reached, or has a wrong certificate | transient |
    | refuses the credentials, or has no such virtual host for them | unavailable |
    | has no such exchange, or does not allow it to this user | unavailable: this exchange |
    | has no queue for the routing key, or does not allow it to this user | unavailable: this routing key |
    | refuses with a nack, for example because of a full queue | transient |
    | does not confirm in time (also after an alarm of memory or disk), or disconnects | transient, "outcome unknown" |
    | refuses an event of a megabyte or more as too large | permanent |

    Raises `ConfigurationError` when the setting `rabbitmq.url` is missing or unusable, `MissingExtraError` without
    aiormq.
    """

    schemes: tuple[str, ...] = ("rabbitmq",)
    _refusals: tuple[type[Exception], ...] = _REFUSED_CREDENTIALS

    def __init__(self, settings: Settings, *, tls_context: ssl.SSLContext | None = None) -> None:
        super().__init__(settings)
        if settings.rabbitmq.url is None:
            raise ConfigurationError("no RabbitMQ server given: set PGOUTBOX_RABBITMQ_URL")
        self._url, self._secrets = _parse_url(settings.rabbitmq.url.get_secret_value(), self._seconds)
        self._tls_context = client_context(
            "RABBITMQ",
            settings.rabbitmq.ca_file,
            "URL",
            "amqps:",
            has_tls=self._url.startswith("amqps:"),
            given=tls_context,
        )
        self._connection: SharedConnection[AbstractConnection] = SharedConnection(self._connect, _is_open)
        self._channels: dict[str, SharedConnection[AbstractChannel]] = {}

    def _target(self, message: Message[object], key: str | None) -> _Address:
        parse_name(message)
        rest = (message.destination or "").partition(":")[2]
        quoted_exchange, slash, quoted_key = rest.partition("/")
        exchange = check_name("destination", unquote(quoted_exchange))
        if quoted_key:
            return _Address(exchange, check_name("destination", unquote(quoted_key)))
        if slash and not exchange:
            raise Permanent("destination: names neither an exchange nor a queue")
        return _Address(exchange, "" if key is None else key)

    def _target_keys(self, target: _Address) -> Sequence[str]:
        return target.exchange_breaker, target.route_breaker

    async def _connected(self, target: _Address | None) -> AbstractConnection:  # noqa: ARG002 - one for all exchanges
        async with asyncio.timeout(self._seconds):
            return await self._connection.get()

    async def _publish(self, connection: AbstractConnection, target: _Address, event: RenderedEvent) -> Outcome:
        is_alone = len(event.content) >= _LARGE_BYTES
        try:
            if is_alone:
                channel = await self._open_channel(target.exchange, connection)
            else:
                channel = await self._shared_channel(target.exchange)
        except Exception as error:  # noqa: BLE001 - nothing was handed over, whatever it was
            text = f"exchange {one_line(target.exchange)!r}: {self._error_text(error)}"
            is_refused = isinstance(error, _REFUSED_EXCHANGE)
            return Unavailable(text, breaker=target.exchange_breaker) if is_refused else Transient(text)
        try:
            return await self._publish_on(channel, target, event)
        finally:
            if is_alone:
                # The outcome of the event is known here. (A closed channel raises RuntimeError.)
                with suppress(amqp.AMQPError, OSError, RuntimeError):
                    await channel.close()

    async def _probe(self, connection: AbstractConnection) -> None:
        await self._open_channel("", connection)

    async def aclose(self) -> None:
        """Close the connection and its channels."""
        connection = await self._connection.take()
        self._channels.clear()
        if connection is not None:
            with suppress(TimeoutError):  # aiormq raises no other error while it closes.
                async with asyncio.timeout(self._seconds):
                    await connection.close()

    async def _connect(self) -> AbstractConnection:
        async with asyncio.timeout(self._seconds):
            factory = _Transport(has_tls=self._tls_context is not None)
            return await aiormq.connect(self._url, context=self._tls_context, transport_factory=factory)

    async def _shared_channel(self, exchange: str) -> AbstractChannel:
        channels = self._channels.get(exchange)
        if channels is None:
            channels = self._channels[exchange] = SharedConnection(lambda: self._open_channel(exchange), _is_open)
        try:
            return await channels.get()
        except Exception:
            if self._channels.get(exchange) is channels:  # Channels of unknown names must not accumulate.
                del self._channels[exchange]
            raise

    async def _open_channel(self, exchange: str, connection: AbstractConnection | None = None) -> AbstractChannel:
        """Open a channel with confirms, and check that the exchange exists."""
        async with asyncio.timeout(self._seconds):
            channel = await (connection or await self._connection.get()).channel(publisher_confirms=True)
            if exchange:
                await channel.exchange_declare(exchange, passive=True)
            return channel

    async def _publish_on(self, channel: AbstractChannel, address: _Address, event: RenderedEvent) -> Outcome:
        """Publish and wait for the confirmation."""
        properties = Basic.Properties(
            message_id=event.id,
            content_type=event.content_type,
            delivery_mode=_PERSISTENT,
            # The names of AMQP 1.0: its consumers get them from RabbitMQ as they are. AMQP 0.9.1 has no binding.
            headers={**event.headers_with("cloudEvents:")},
        )
        await pass_gate()
        try:
            async with asyncio.timeout(self._seconds):
                await channel.basic_publish(
                    event.content,
                    exchange=address.exchange,
                    routing_key=address.routing_key,
                    properties=properties,
                    mandatory=True,
                )
        except amqp.PublishError:
            text = f"no queue for the routing key {one_line(address.routing_key)!r}"
            return Unavailable(text, breaker=address.route_breaker)
        except amqp.DeliveryError:
            return Transient("publish: refused by a queue (nack)")
        except amqp.ChannelPreconditionFailed as error:
            if len(event.content) >= _LARGE_BYTES:
                return Permanent(f"event.data: {self._error_text(error)}")
            return SendFailure("outcome unknown: the channel was closed: PRECONDITION_FAILED", unknown=True)
        except _REFUSED_EXCHANGE as error:
            return self._refusal(address, error)
        except amqp.ChannelClosed as error:
            return Transient(f"publish: {self._error_text(error)}")
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            return SendFailure("outcome unknown: connection lost before the confirmation", outage=True, unknown=True)
        return Sent()

    def _refusal(self, address: _Address, error: Exception) -> Outcome:
        """Return the outcome of an event whose channel RabbitMQ closed: it refuses the exchange, or one routing key."""
        text = f"publish: {self._error_text(error)}"
        refused = _REFUSED_ROUTE.search(str(error))
        if refused is None:
            return Unavailable(text, breaker=address.exchange_breaker)
        if refused[1] == address.routing_key:
            return Unavailable(text, breaker=address.route_breaker)
        return Transient(text)  # The channel was refused another event.


class _Transport(TransportFactory):
    """aiormq's transport without long frames. aiormq itself waits for a frame of any length."""

    def __init__(self, *, has_tls: bool) -> None:
        self._factory = TLSTransportFactory() if has_tls else TCPTransportFactory()

    async def create(self, url: URL, **options: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:  # noqa: ANN401
        reader, writer = await self._factory.create(url, **options)
        reader.__class__ = _FrameReader  # asyncio itself creates it.
        return reader, writer


class _FrameReader(asyncio.StreamReader):
    async def readexactly(self, n: int) -> bytes:
        if n > MAX_ANSWER_BYTES:
            raise ConnectionAbortedError("a frame is longer than those of any RabbitMQ")
        return await super().readexactly(n)


def _is_open(connection: AbstractConnection | AbstractChannel) -> bool:
    return not connection.is_closed


def _parse_url(text: str, seconds: float) -> tuple[str, tuple[str, ...]]:
    """Return the URL with a heartbeat, so that a lost server is noticed; and its secrets."""
    try:
        url = urlsplit(text)
        if url.port == 0:
            raise ValueError  # noqa: TRY301 - like a port that is not a number
    except ValueError:
        url = urlsplit("")
    if url.scheme not in ("amqp", "amqps") or not url.hostname:
        raise ConfigurationError(
            "PGOUTBOX_RABBITMQ_URL=(hidden): is not a URL such as amqps://user:password@localhost/vhost"
        )
    query = {"heartbeat": str(max(2, int(seconds)))} | dict(parse_qsl(url.query))
    password = url.password or ""
    return url._replace(query=urlencode(query)).geturl(), tuple(filter(None, {password, unquote(password)}))
