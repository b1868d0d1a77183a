"""The transport that publishes events to NATS JetStream.

The id of an event is its `Nats-Msg-Id`: within the stream's duplicate window JetStream drops duplicates. Each event is
published once; only the retry policy repeats.
"""

from __future__ import annotations

import asyncio
import re
import ssl
import string
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import ParseResult, SplitResult, quote, unquote, urlsplit

from pgoutbox.errors import ConfigurationError, MissingExtraError
from pgoutbox.message import Message, Outcome, Permanent, Sent, Transient, Unavailable
from pgoutbox.text import one_line
from pgoutbox.transports import pass_gate
from pgoutbox.transports.brokers.broker import MAX_ANSWER_BYTES, BrokerTransport, SharedConnection
from pgoutbox.transports.brokers.events import RenderedEvent, parse_name
from pgoutbox.transports.tls import client_context

try:
    from nats.aio.client import Client
    from nats.aio.transport import TcpTransport
    from nats.js.errors import APIError, NoStreamResponseError
    from nats.protocol.parser import Parser
except ImportError:
    raise MissingExtraError("the NATS transport", "nats") from None

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pgoutbox.settings import Settings

__all__ = ["NatsTransport"]

_SCHEMES: Final = frozenset({"nats", "tls"})
# Errors of the JetStream API about the message: larger than the stream accepts, and headers too large.
_MESSAGE_ERRORS: Final = frozenset({10054, 10097})
# Only the text of nats-py's error identifies refused credentials.
_AUTHORIZATION: Final = re.compile(r"authori[sz]ation|authentication", re.IGNORECASE)
# The printable characters of ASCII that the CloudEvents binding does not percent-encode.
_UNENCODED: Final = string.punctuation.replace('"', "").replace("%", "")
_REFUSED_SUBJECT: Final = re.compile(r'publish to "([^"]*)"', re.IGNORECASE)


class NatsTransport(BrokerTransport[str, "_Connection"]):
    """Publishes a `CloudEvent` to the subject that the destination names, `nats:orders.placed`.

    All sends share one connection. The first send opens it, and it is replaced when it broke. The headers `Nats-Msg-Id`
    and `Content-Type` are added to the event's own, and in binary mode the attributes, with the prefix `ce-` and
    percent-encoded. With `tls:` in one of the URLs, or a `tls_context`, nothing is sent in plain text, and the
    certificate and its host name are verified.

    | NATS | outcome |
    |---|---|
    | a stream acknowledges, as new or as a duplicate | sent |
    | cannot be reached, or has a wrong certificate | transient |
    | refuses the credentials | unavailable |
    | no stream has the subject, or the account may not publish to it | unavailable: this subject |
    | does not acknowledge in time, or disconnects | transient, "outcome unknown" |
    | the event is larger than the server or the stream accepts | permanent |
    | the stream refuses for another reason: full, sealed, no quorum | transient |

    Raises `ConfigurationError` when the setting `nats.url` is missing or unusable, `MissingExtraError` without nats-py.
    """

    schemes: tuple[str, ...] = ("nats",)
    _kind: str = "subject"

    def __init__(self, settings: Settings, *, tls_context: ssl.SSLContext | None = None) -> None:
        super().__init__(settings)
        if settings.nats.url is None:
            raise ConfigurationError("no NATS server given: set PGOUTBOX_NATS_URL")
        self._servers = _parse_servers(settings.nats.url.get_secret_value())
        first = self._servers[0]
        # nats-py takes both from the URL too, but without decoding them.
        self._user = unquote(first.username) if first.username is not None else None
        self._password = unquote(first.password) if first.password is not None else None
        token = self._user if self._password is None else None
        self._secrets = tuple(filter(None, (self._password, first.password, token)))
        # One server with TLS is enough: all of them get the same password.
        has_tls = tls_context is not None or any(server.scheme == "tls" for server in self._servers)
        self._tls_context = client_context(
            "NATS", settings.nats.ca_file, "URL", "tls:", has_tls=has_tls, given=tls_context
        )
        self._connection: SharedConnection[_Connection] = SharedConnection(self._connect, lambda link: link.is_open)

    async def _connected(self, target: str | None) -> _Connection:  # noqa: ARG002 - one for all subjects
        async with asyncio.timeout(self._seconds):
            return await self._connection.get()

    def _target(self, message: Message[object], key: str | None) -> str:  # noqa: ARG002 - NATS has no keys of messages
        """Return the subject to publish to: no wildcard, and none of NATS's system subjects."""
        subject = parse_name(message)
        tokens = subject.split(".")
        if "" in tokens:
            raise Permanent("destination: a part of the subject between dots is empty")
        if re.search(r"\s", subject):
            raise Permanent("destination: the subject contains white space")
        if "*" in tokens or ">" in tokens:
            raise Permanent("destination: the subject has a wildcard; an event goes to one subject")
        if subject.startswith(("$", "_INBOX.")):
            raise Permanent("destination: the subject is one of NATS itself")
        return subject

    def _is_refused(self, error: Exception) -> bool:
        return _AUTHORIZATION.search(str(error)) is not None

    async def _probe(self, connection: _Connection) -> None:
        await connection.client.flush(timeout=max(1, int(self._seconds)))

    async def aclose(self) -> None:
        """Close the connection."""
        connection = await self._connection.take()
        if connection is not None:
            # All sends have ended. The server may be gone: OSError.
            with suppress(TimeoutError, OSError):
                async with asyncio.timeout(self._seconds):
                    await connection.client.close()

    async def _connect(self) -> _Connection:
        connection = _Connection()
        async with asyncio.timeout(self._seconds):
            await connection.open(
                servers=[server._replace(netloc=server.netloc.rpartition("@")[2]).geturl() for server in self._servers],
                connect_timeout=max(1, int(self._seconds)),
                # Two missing answers end a connection to a lost server.
                ping_interval=max(1, int(self._seconds)),
                tls=self._tls_context,
                user=self._user if self._password is not None else None,
                password=self._password,
                token=self._user if self._password is None else None,
            )
        return connection

    async def _publish(self, connection: _Connection, target: str, event: RenderedEvent) -> Outcome:
        headers = {**_headers(event), "Nats-Msg-Id": event.id, "Content-Type": event.content_type}
        size, limit = _size(headers, event.content), connection.client.max_payload
        if size > limit:  # The server would end the connection, and with it other sends in progress.
            return Permanent(f"event.data: {size} bytes with their headers are more than the server's {limit}")
        await pass_gate()
        try:
            await connection.publish(target, event.content, headers, self._seconds)
        except NoStreamResponseError:
            return Unavailable(f"no stream has the subject {one_line(target)!r}", breaker=self._target_key(target))
        except APIError as error:
            text = f"publish: {one_line(error.description or '')} ({error.err_code})"
            return Permanent(f"event.data: {text}") if error.err_code in _MESSAGE_ERRORS else Transient(text)
        except PermissionError as error:
            return Unavailable(f"publish: {self._error_text(error)}", breaker=self._target_key(target))
        return Sent()


class _Connection:
    """A client of nats-py that never reconnects by itself. Its end and its refusals wake waiting sends at once."""

    def __init__(self) -> None:
        self.client = Client()
        self._lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting: dict[str, set[asyncio.Future[None]]] = {}
        self._error: Exception | None = None

    @property
    def is_open(self) -> bool:
        return self.client.is_connected and not self._lost.done()

    async def open(self, *, tls: ssl.SSLContext | None, **options: Any) -> None:  # noqa: ANN401 - nats-py's
        """Connect to the first of the servers that answers."""
        self.client._transport = _Transport(self.client._ps, needs_tls=tls is not None)
        try:
            await self.client.connect(
                error_cb=self._note_error,
                closed_cb=self._note_end,
                allow_reconnect=False,
                max_reconnect_attempts=1,
                reconnect_time_wait=0,
                tls=tls,
                **options,
            )
        except BaseException as error:
            # nats-py does not close a refused or half-open connection.
            transport = self.client._transport
            if transport is not None:
                transport.close()  # type: ignore[no-untyped-call] # nats-py is typed in part
            if isinstance(error, Exception) and self._error is not None:
                raise self._error from None  # The client only reports that no server is left; this is the reason.
            raise

    async def publish(self, subject: str, content: bytes, headers: Mapping[str, str], seconds: float) -> None:
        """Publish and wait for the acknowledgement, the end of the connection or a refusal of the subject."""
        refused: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(subject, set()).add(refused)
        request = asyncio.ensure_future(
            self.client.jetstream().publish(subject, content, timeout=seconds, headers=dict(headers))
        )
        try:
            ends: list[asyncio.Future[Any]] = [request, refused, self._lost]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if request.done() and not request.cancelled():
                request.result()
            elif refused.done():
                refused.result()
            else:
                raise ConnectionError(f"connection lost: {self._error}" if self._error else "connection lost")
        finally:
            request.cancel()
            refused.cancel()
            self._waiting[subject].discard(refused)
            if not self._waiting[subject]:
                del self._waiting[subject]

    async def _note_error(self, error: Exception) -> None:
        self._error = error
        found = _REFUSED_SUBJECT.search(str(error))
        for refused in self._waiting.get(found[1], ()) if found else ():
            if not refused.done():
                refused.set_exception(PermissionError(str(error)))

    async def _note_end(self) -> None:
        if not self._lost.done():
            self._lost.set_result(None)


class _Transport(TcpTransport):
    """nats-py's transport without long answers, and without plain text if TLS is configured.

    nats-py itself keeps an answer of any length, and lets the server decide about TLS.
    """

    def __init__(self, parser: Parser, *, needs_tls: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # nats-py is typed in part
        self._parser = parser
        self._needs_tls = needs_tls
        self._is_encrypted = False

    def __bool__(self) -> bool:
        return True  # Otherwise nats-py uses another transport until this one is connected.

    async def connect(self, uri: ParseResult, buffer_size: int, connect_timeout: int) -> None:
        self._is_encrypted = False
        await super().connect(uri, buffer_size, connect_timeout)

    async def connect_tls(
        self, uri: str | ParseResult, ssl_context: ssl.SSLContext, buffer_size: int, connect_timeout: int
    ) -> None:
        await super().connect_tls(uri, ssl_context, buffer_size, connect_timeout)
        self._is_encrypted = True

    async def read(self, buffer_size: int) -> bytes:
        if len(self._parser.buf) > MAX_ANSWER_BYTES:
            raise ConnectionAbortedError("the answer is longer than that of any NATS server")
        return bytes(await super().read(buffer_size))

    def write(self, payload: bytes) -> None:
        self._refuse_plain_text()
        super().write(payload)  # type: ignore[no-untyped-call] # nats-py is typed in part

    def writelines(self, payload: list[bytes]) -> None:
        self._refuse_plain_text()
        super().writelines(payload)  # type: ignore[no-untyped-call] # nats-py is typed in part

    def _refuse_plain_text(self) -> None:
        if self._needs_tls and not self._is_encrypted:
            raise ConnectionRefusedError("the server does not offer TLS, and plain text is refused")


def _parse_servers(urls: str) -> list[SplitResult]:
    try:
        servers = [urlsplit(url.strip()) for url in urls.split(",")]
        is_sound = all(server.scheme in _SCHEMES and server.hostname and server.port != 0 for server in servers)
    except ValueError:
        is_sound = False
        servers = []
    if not is_sound:
        raise ConfigurationError("PGOUTBOX_NATS_URL=(hidden): is not a URL such as nats://user:password@localhost:4222")
    return [
        server if server.port is not None else server._replace(netloc=f"{server.netloc}:4222") for server in servers
    ]


def _headers(event: RenderedEvent) -> Mapping[str, str]:
    if not event.attributes:
        return event.headers
    # The binding of NATS is the only one that repeats the content type, and encodes the values.
    attributes = {**event.attributes, "datacontenttype": event.content_type}
    return {**event.headers, **{f"ce-{name}": quote(value, safe=_UNENCODED) for name, value in attributes.items()}}


def _size(headers: Mapping[str, str], content: bytes) -> int:
    lines = (len(name.encode()) + len(value.encode()) + 4 for name, value in headers.items())
    return len(b"NATS/1.0\r\n") + sum(lines) + 2 + len(content)
