"""The transport that appends events to Redis streams.

Each event is one XADD, which the transport never repeats: Redis does not recognise a repetition, so only the retry
policy may repeat. The entry's field `id`, the same at every attempt, lets the consumer recognise a repetition.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from pgoutbox.errors import ConfigurationError, MissingExtraError
from pgoutbox.message import Message, Outcome, SendFailure, Sent, Unavailable
from pgoutbox.transports import pass_gate
from pgoutbox.transports.brokers.broker import MAX_ANSWER_BYTES, BrokerTransport
from pgoutbox.transports.brokers.events import RenderedEvent, parse_name
from pgoutbox.transports.tls import IS_IT_TLS, client_context

try:
    from redis._parsers import _AsyncRESP2Parser
    from redis.asyncio import ConnectionPool
    from redis.asyncio.retry import Retry
    from redis.backoff import NoBackoff
    from redis.exceptions import (
        AuthenticationError,
        BusyLoadingError,
        ClusterDownError,
        InvalidResponse,
        NoPermissionError,
        OutOfMemoryError,
        ReadOnlyError,
        RedisError,
        ResponseError,
    )
except ImportError:
    raise MissingExtraError("the Redis transport", "redis") from None

if TYPE_CHECKING:
    from redis.asyncio.connection import AbstractConnection

    from pgoutbox.settings import Settings
    from pgoutbox.transports import Content

__all__ = ["RedisTransport"]

# Refusals that concern all streams, and may pass without a repair.
_SERVER_FAULTS = (BusyLoadingError, ClusterDownError, OutOfMemoryError)


class RedisTransport(BrokerTransport[str, "AbstractConnection"]):
    """Appends a `CloudEvent` to the stream that the destination names, `redis:orders`.

    An entry has the fields `id`, `content-type` and `data`, and one for each of the event's headers. In binary mode it
    also has the attributes, with the prefix `ce-`. The first entry creates the stream. Streams are never trimmed. At
    most `connection_count` connections are open at once. They are opened when they are needed, and replaced when they
    broke. With `rediss:` nothing is sent in plain text, and the certificate and its host name are verified.

    | Redis | outcome |
    |---|---|
    | answers XADD with the id of the entry | sent |
    | cannot be reached, or has a wrong certificate | transient |
    | refuses the password, or demands one | unavailable |
    | is a replica, or does not allow the user to append (NOPERM) | unavailable |
    | refuses this stream to the user (NOPERM), or the key is not a stream (WRONGTYPE) | unavailable: this stream |
    | does not answer XADD in time, or disconnects | transient, "outcome unknown" |
    | refuses for another reason: memory, loading, cluster | transient |

    Raises `ConfigurationError` when the setting `redis.url` is missing or unusable, `MissingExtraError` without redis.
    """

    schemes: tuple[str, ...] = ("redis",)
    _kind: str = "stream"
    _refusals: tuple[type[Exception], ...] = (AuthenticationError,)

    def __init__(self, settings: Settings, *, connection_count: int = 10) -> None:
        super().__init__(settings)
        if settings.redis.url is None:
            raise ConfigurationError("no Redis server given: set PGOUTBOX_REDIS_URL")
        url = settings.redis.url.get_secret_value()
        try:
            # Connecting is tried once; the retry policy repeats. The time limits are our own.
            self._pool: ConnectionPool = ConnectionPool.from_url(
                url,
                protocol=2,
                parser_class=_Parser,
                retry=Retry(NoBackoff(), 0),
                socket_timeout=None,
                socket_connect_timeout=None,
            )
        except (ValueError, TypeError):
            raise ConfigurationError(
                "PGOUTBOX_REDIS_URL=(hidden): is not a URL such as redis://user:password@localhost:6379/0"
            ) from None
        self._has_tls = _verify(self._pool, settings.redis.ca_file)
        password = urlsplit(url).password or ""
        given = (self._pool.connection_kwargs.get(name) for name in ("password", "ssl_password"))
        self._secrets = tuple(filter(None, {password, unquote(password), *given}))
        self._slots = asyncio.Semaphore(connection_count)

    def _target(self, message: Message[object], key: str | None) -> str:  # noqa: ARG002 - Redis has no keys of entries
        return parse_name(message)

    async def send(self, message: Message[object], content: Content) -> Outcome:
        """See `BrokerTransport`. Wait for a free connection first."""
        async with self._slots:
            return await super().send(message, content)

    async def _connected(self, target: str | None) -> AbstractConnection:  # noqa: ARG002 - one for all streams
        try:
            async with asyncio.timeout(self._seconds):
                connection: AbstractConnection = await self._pool.get_connection()  # type: ignore[no-untyped-call] # redis is typed in part
                return connection
        except TimeoutError as error:
            if not self._has_tls:
                raise
            # A Redis without TLS reads it as an incomplete command, and waits.
            raise ConnectionError(f"{self._error_text(error)}; {IS_IT_TLS}") from None

    async def _probe(self, connection: AbstractConnection) -> None:
        await self._run(connection, "PING")

    async def aclose(self) -> None:
        """Close every connection."""
        await self._pool.disconnect()

    async def _publish(self, connection: AbstractConnection, target: str, event: RenderedEvent) -> Outcome:
        fields: list[str | bytes] = ["id", event.id, "content-type", event.content_type, "data", event.content]
        for name, value in event.headers_with("ce-").items():
            fields += [name, value]
        try:
            await self._run(connection, "XADD", target, "*", *fields)
        except AuthenticationError as error:  # Redis demands a password, and none is set.
            return Unavailable(f"XADD: {self._error_text(error)}")
        except (ResponseError, *_SERVER_FAULTS) as error:
            return self._refusal(target, error)
        return Sent()

    async def _run(self, connection: AbstractConnection, *command: str | bytes) -> None:
        """Run a command after `pass_gate`, and give the connection back."""
        try:
            await pass_gate()
            async with asyncio.timeout(self._seconds):
                await connection.send_command(*command)
                # Without an answer it closes the connection, so that a late answer is not read as the answer of the
                # next command.
                await connection.read_response(disconnect_on_error=True)
        finally:
            await self._pool.release(connection)

    def _refusal(self, stream: str, error: RedisError) -> Outcome:
        text = f"XADD: {self._error_text(error)}"
        if isinstance(error, NoPermissionError):
            # Only the text tells a forbidden command from a forbidden stream.
            return Unavailable(text, breaker=None if "to run the" in str(error) else self._target_key(stream))
        if isinstance(error, ReadOnlyError):
            return Unavailable(text)
        if str(error).startswith("WRONGTYPE"):
            return Unavailable(text, breaker=self._target_key(stream))
        return SendFailure(text, outage=isinstance(error, _SERVER_FAULTS))


class _Parser(_AsyncRESP2Parser):
    """redis-py's parser without long answers and without arrays, which no command of ours gets."""

    async def _readline(self) -> bytes:
        line = bytes(await super()._readline())
        if line[:1] == b"*" or (line[:1] == b"$" and int(line[1:]) > MAX_ANSWER_BYTES):
            raise InvalidResponse("the answer is longer than that of any Redis")
        return line


def _verify(pool: ConnectionPool, ca_file: str | None) -> bool:
    """Make connections of `rediss:` verify the server, and return whether there is TLS. The URL alone does not."""
    given = pool.connection_kwargs
    has_tls = any(scheme.__name__ == "SSLConnection" for scheme in pool.connection_class.__mro__)
    # The pool makes contexts of its own; this one checks the file.
    client_context("REDIS", ca_file, "URL", "rediss:", has_tls=has_tls)
    if not has_tls:
        return False
    if given.get("ssl_cert_reqs", "required") != "required" or given.get("ssl_check_hostname", True) is not True:
        raise ConfigurationError(
            "PGOUTBOX_REDIS_URL=(hidden): turns the verification of the server off, with ssl_cert_reqs or "
            "ssl_check_hostname; name the server's authority by PGOUTBOX_REDIS_CA_FILE instead"
        )
    given |= {"ssl_cert_reqs": "required", "ssl_check_hostname": True}
    if ca_file is not None:
        given["ssl_ca_certs"] = ca_file
    return True
