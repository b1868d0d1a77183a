"""The transport that sends webhooks, and never to an address that is not public.

A name is resolved once, all of its addresses are checked, and one of the checked addresses is dialled; the certificate
must still be for the name. Proxies of the environment, cookies and redirects are not used. Only the status of an answer
is recorded, unless the settings ask for an excerpt.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, field
from datetime import UTC
from email.utils import parsedate_to_datetime
from functools import cached_property
from hashlib import blake2b
from http import HTTPStatus
from importlib.util import find_spec
from typing import TYPE_CHECKING, Protocol, cast

from pgoutbox.errors import MissingExtraError
from pgoutbox.message import Message, Outcome, Permanent, SendFailure, Sent, Unavailable
from pgoutbox.observability.events import LogEvent, Telemetry
from pgoutbox.observability.tracing import current_context
from pgoutbox.text import one_line
from pgoutbox.transports import breaker_key_of, pass_gate
from pgoutbox.transports.tls import verifying_context
from pgoutbox.transports.webhook.request import RenderedRequest, Rules, Webhook, render, secret_key

if TYPE_CHECKING:
    import httpcore

    from pgoutbox.settings import Settings
    from pgoutbox.transports import Content
    from pgoutbox.transports.webhook.url_policy import Endpoint, UrlPolicy

__all__ = ["Webhook", "WebhookTransport"]

_telemetry = Telemetry(logging.getLogger("pgoutbox.transports.webhook"))

MAX_ANSWER_BYTES = 64 * 1024
_REST_SECONDS = 2.0
_IDLE_SECONDS = 30.0
_MAX_RESOLVER_THREADS = 32
_MAX_DIALLED_ADDRESSES = 4
_MIN_HIDDEN_LENGTH = 6
_KNOWN_TO_ALL = frozenset({b"host", b"content-type", b"content-length", b"accept-encoding", b"idempotency-key"})
_UNAUTHORIZED = 401
_FORBIDDEN = 403
_TRANSIENT_STATUSES = frozenset({408, 425, 429})


def is_installed() -> bool:
    """Whether the extra `webhook` is installed. Imports none of its packages."""
    return find_spec("httpcore") is not None and find_spec("anyio") is not None


class WebhookTransport:
    """Sends `Webhook` to the URL that the message or the content names.

    One instance serves one event loop. At most `webhook.connections` requests run at once; connections are reused while
    they are fresh. One deadline covers the whole exchange. TLS 1.2 or newer is verified against the CAs of the system
    and `webhook.ca_file`. `clock`, in seconds since 1970, gives the time of signatures.

    Raises `ConfigurationError` when a setting is unusable, `MissingExtraError` without httpcore.
    """

    def __init__(self, settings: Settings, *, clock: Callable[[], float] = time.time) -> None:
        if not is_installed():
            raise MissingExtraError("the webhook transport", "webhook")
        self._settings = settings.webhook
        self._clock = clock
        self._rules = Rules.of(self._settings)
        if self._settings.ca_file is not None:
            _ = self._tls_context
        self._slots = asyncio.Semaphore(self._settings.connections)
        self._idle: list[_Connection] = []

    @property
    def schemes(self) -> tuple[str, ...]:
        """`https`, and `http` if the settings allow it."""
        return ("https", "http") if self._settings.allow_http else ("https",)

    async def send(self, message: Message[object], content: Content) -> Outcome:
        """Send the request once and classify the answer.

        `Sent` means that the receiver answered 2xx. `Permanent` names the wrong field, or the answer that no repetition
        changes. Refused credentials (401) are `Unavailable`, for this URL alone. Other failures are `Transient`; those
        with the status 403 count for this URL alone. If the connection breaks after the request was sent, the outcome
        is unknown: the next attempt may be a duplicate, with the same `webhook-id`.
        """
        if not isinstance(content, Webhook):
            return Permanent(f"content: the webhook transport sends a Webhook, not {type(content).__name__}")
        try:
            request = render(content, message, self._rules)
        except (Permanent, Unavailable) as refusal:
            return refusal
        if self._settings.trace_context:
            request = request.with_headers(current_context())
        async with self._slots:
            return await self._exchange(request, self._access_key(message, content))

    def breaker_key(self, message: Message[object], content: Content | None) -> str | None:
        """Return a key for each scheme, host and port."""
        url = content.url if isinstance(content, Webhook) else None
        return breaker_key_of(url or message.destination or "")

    def part_keys(self, message: Message[object], content: Content) -> Sequence[str]:
        """Return the keys of the secret of the settings, if it signs the request, and of the access to this URL."""
        if not isinstance(content, Webhook):
            return ()
        secret = secret_key(content)
        return (self._access_key(message, content), *(() if secret is None else (secret,)))

    def _access_key(self, message: Message[object], content: Webhook) -> str:
        # Receivers may share a host, and a URL may contain a token: its digest tells them apart.
        digest = blake2b(str(content.url or message.destination).encode(), digest_size=4).hexdigest()
        return f"{self.breaker_key(message, content)} access {digest}"

    async def aclose(self) -> None:
        """Close every connection."""
        idle, self._idle = self._idle, []
        await asyncio.gather(*(connection.close() for connection in idle))
        if "_resolver" in vars(self):
            self._resolver.shutdown(wait=False, cancel_futures=True)

    async def _exchange(self, request: RenderedRequest, access_key: str) -> Outcome:
        connection = await self._take_idle(request.endpoint) or self._new_connection(request.endpoint)
        answer = _Answer()
        try:
            async with asyncio.timeout(self._settings.timeout_seconds):
                try:
                    await connection.ask(request, answer, clock=self._clock)
                except _DeadConnectionError:
                    # It died while it was idle, and nothing was written: try a new connection, which cannot have this
                    # problem.
                    await connection.close()
                    connection = self._new_connection(request.endpoint)
                    await connection.ask(request, answer, clock=self._clock)
        except _RefusedAddress:
            return Permanent(
                f"{request.endpoint.host}: is not in the public internet, nor in a network that "
                "PGOUTBOX_WEBHOOK_ALLOWED_NETWORKS allows"
            )
        except _failures() as error:
            if answer.status is None:
                return self._broken_off(connection, error)
        finally:
            await self._keep_or_close(connection)
        return self._classify(request, answer, access_key)

    def _broken_off(self, connection: _Connection, error: BaseException) -> Outcome:
        import httpcore

        if isinstance(error, httpcore.LocalProtocolError):
            return Permanent("the request is not valid HTTP")
        if not connection.may_have_sent:
            text = str(error) or f"no connection within {self._connect_seconds:g} s"
            return SendFailure(f"connect: {one_line(text)}", outage=True)
        # The texts of httpcore would quote the receiver's data.
        match error:
            case httpcore.RemoteProtocolError():
                text = "the connection was closed without an answer, or the answer is not HTTP"
            case httpcore.TimeoutException() | TimeoutError():
                text = f"no answer within {self._settings.timeout_seconds:g} s"
            case _:
                text = "the connection was lost"
        return SendFailure(f"outcome unknown: {text}", outage=True, unknown=True)

    def _classify(self, request: RenderedRequest, answer: _Answer, access_key: str) -> Outcome:
        status = answer.status or 0
        if 200 <= status <= 299:
            return Sent()
        error = _status_text(status)
        if 300 <= status <= 399:
            return Permanent(f"{error}: redirects are not followed; change the destination")
        if excerpt := answer.excerpt(self._settings.error_body_chars, hide=request):
            error = f"{error}: {excerpt}"
        if status == _UNAUTHORIZED:
            return Unavailable(error, breaker=access_key)
        if status == _FORBIDDEN:  # Either no request to this URL is allowed, or the receiver refuses this content.
            return SendFailure(error, retry_after=self._retry_after(answer), outage=True, breaker=access_key)
        if status in _TRANSIENT_STATUSES or 500 <= status <= 599:
            return SendFailure(error, retry_after=self._retry_after(answer), outage=status >= 500)
        return Permanent(error)

    def _retry_after(self, answer: _Answer) -> float | None:
        asked = retry_after_seconds(answer.header(b"retry-after"), answer.header(b"date"), now=self._clock())
        return None if asked is None else min(asked, self._settings.retry_after_cap_seconds)

    async def _take_idle(self, endpoint: Endpoint) -> _Connection | None:
        """Return the most recently used connection to this host and port, and close dead ones.

        It may still die before the request is written; `_Connection.ask` checks it again.
        """
        dead = [connection for connection in self._idle if not connection.is_ready]
        self._idle = [connection for connection in self._idle if connection.is_ready]
        found = None
        for index in reversed(range(len(self._idle))):
            if self._idle[index].serves(endpoint):
                found = self._idle.pop(index)
                break
        for connection in dead:
            await connection.close()
        return found

    def _new_connection(self, endpoint: Endpoint) -> _Connection:
        return _Connection(
            endpoint,
            dialler=_Dialler(self._rules.policy, self._resolver),
            tls_context=self._tls_context if endpoint.scheme == "https" else None,
            timeout_seconds=self._connect_seconds,
        )

    @property
    def _connect_seconds(self) -> float:
        return min(self._settings.connect_timeout_seconds, self._settings.timeout_seconds)

    async def _keep_or_close(self, connection: _Connection) -> None:
        """Keep the connection if its exchange is complete on both sides, also after a cancellation. Else close it."""
        if not connection.is_ready:
            await connection.close()
            return
        self._idle.append(connection)
        if len(self._idle) > self._settings.connections:
            await self._idle.pop(0).close()

    @cached_property
    def _tls_context(self) -> ssl.SSLContext:
        context = verifying_context(variable="PGOUTBOX_WEBHOOK_CA_FILE", ca_file=self._settings.ca_file)
        context.set_alpn_protocols(["http/1.1"])
        return context

    @cached_property
    def _resolver(self) -> ThreadPoolExecutor:
        # Separate threads: a slow name server of a receiver must not delay other look-ups of this process.
        count = min(self._settings.connections, _MAX_RESOLVER_THREADS)
        return ThreadPoolExecutor(count, thread_name_prefix="pgoutbox-resolver")


class _Chunks(Protocol):
    """The body of an answer, from httpcore."""

    def __aiter__(self) -> AsyncGenerator[bytes, None]: ...


class _RefusedAddress(Exception):  # noqa: N818 - it becomes an outcome
    """A host has a forbidden address."""


class _DeadConnectionError(Exception):
    """The receiver had closed an idle connection before any part of the request was written."""


@dataclass(frozen=True, slots=True)
class _Dialler:
    """Connects to the hosts that the policy allows."""

    policy: UrlPolicy
    resolver: ThreadPoolExecutor

    async def dial(self, endpoint: Endpoint, timeout_seconds: float) -> httpcore.AsyncNetworkStream:
        """Open a connection to a checked address. The addresses are tried in turn.

        Raises `_RefusedAddress` if one of the host's addresses is not admitted. Then it does not try the others,
        because the next look-up may return another order.
        """
        import httpcore

        addresses = await self._addresses(endpoint)
        failure: Exception = httpcore.ConnectError("the host has no address")
        for address in addresses:
            try:
                return await httpcore.AnyIOBackend().connect_tcp(
                    address, endpoint.port, timeout=timeout_seconds / len(addresses)
                )
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                failure = error
        raise failure

    async def _addresses(self, endpoint: Endpoint) -> Sequence[str]:
        def look_up() -> list[str]:
            found = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
            return list(dict.fromkeys(str(address[0]) for *_, address in found))

        addresses = await asyncio.get_running_loop().run_in_executor(self.resolver, look_up)
        for address in addresses:
            if not self.policy.allows(address):
                # Only for the operator: it would reveal details of the network to the author of the URL.
                text = "a webhook to an address that is not public was refused"
                _telemetry.report(
                    logging.WARNING, LogEvent.WEBHOOK_ADDRESS_REFUSED, text, host=endpoint.host, address=address
                )
                raise _RefusedAddress
        return addresses[:_MAX_DIALLED_ADDRESSES]


class _Connection:
    """One connection to a host and port. `is_ready`: a request can be sent on it."""

    def __init__(
        self, endpoint: Endpoint, *, dialler: _Dialler, tls_context: ssl.SSLContext | None, timeout_seconds: float
    ) -> None:
        self._endpoint = endpoint
        self._dialler = dialler
        self._tls_context = tls_context
        self._timeout_seconds = timeout_seconds
        self._stream: httpcore.AsyncNetworkStream | None = None
        self._wire: _Wire | None = None
        self._http: httpcore.AsyncHTTP11Connection | None = None

    @property
    def may_have_sent(self) -> bool:
        """Whether any part of the last request was written, so that the receiver may have it."""
        return self._wire is not None and self._wire.may_have_written

    @property
    def is_ready(self) -> bool:
        return self._http is not None and self._http.is_idle() and not self._http.has_expired()

    def serves(self, endpoint: Endpoint) -> bool:
        mine = self._endpoint
        return (mine.scheme, mine.host, mine.port) == (endpoint.scheme, endpoint.host, endpoint.port)

    async def _open(self) -> httpcore.AsyncHTTP11Connection:
        """Resolve, dial and shake hands, unless already open. The certificate must be for the host of the URL."""
        import httpcore

        if self._http is not None:
            return self._http
        async with asyncio.timeout(self._timeout_seconds):
            self._stream = await self._dialler.dial(self._endpoint, self._timeout_seconds)
            if self._tls_context is not None:
                self._stream = await self._stream.start_tls(self._tls_context, self._endpoint.host)
        self._wire = _Wire(self._stream)
        self._http = httpcore.AsyncHTTP11Connection(
            _origin(self._endpoint), cast("httpcore.AsyncNetworkStream", self._wire), _IDLE_SECONDS
        )
        return self._http

    async def ask(self, request: RenderedRequest, answer: _Answer, *, clock: Callable[[], float]) -> None:
        """Send the request, signed for this second, and read the answer with a limited part of its body.

        Raises `_DeadConnectionError` for a used connection that has died.
        """
        import httpcore

        if self._wire is not None:
            self._wire.begin_again()
        http = await self._open()
        await pass_gate()
        headers = list(request.signed_headers(int(clock())))
        response = await http.handle_async_request(
            httpcore.Request(request.method, _url(request.endpoint), headers=headers, content=request.body)
        )
        answer.headers = response.headers
        answer.status = response.status
        async with asyncio.timeout(_REST_SECONDS):
            async with aclosing(aiter(cast("_Chunks", response.stream))) as chunks:
                async for chunk in chunks:
                    answer.body += chunk
                    if len(answer.body) > MAX_ANSWER_BYTES:
                        break
            await response.aclose()

    async def close(self) -> None:
        """Close at once, also during an exchange."""
        if self._http is not None:
            await self._http.aclose()
        if self._stream is not None:
            await self._stream.aclose()


class _Wire:
    """The bytes of a connection. It records whether any bytes of a request may have been sent."""

    def __init__(self, stream: httpcore.AsyncNetworkStream) -> None:
        self._stream = stream
        self._was_idle = False
        self.may_have_written = False

    def begin_again(self) -> None:
        """Begin another request, on a connection that may have died while it was idle."""
        self._was_idle = True
        self.may_have_written = False

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:  # noqa: ASYNC109 - httpcore's
        # Data before a request is written is not an answer to it: it is the end of the connection.
        if self._was_idle and not self.may_have_written and self._stream.get_extra_info("is_readable"):
            raise _DeadConnectionError
        self.may_have_written = True
        await self._stream.write(buffer, timeout)

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:  # noqa: ASYNC109 - httpcore's
        return await self._stream.read(max_bytes, timeout)

    async def aclose(self) -> None:
        await self._stream.aclose()

    def get_extra_info(self, info: str) -> object:
        return self._stream.get_extra_info(info)


def _origin(endpoint: Endpoint) -> httpcore.Origin:
    import httpcore

    return httpcore.Origin(endpoint.scheme.encode(), endpoint.host.encode(), endpoint.port)


def _url(endpoint: Endpoint) -> httpcore.URL:
    import httpcore

    return httpcore.URL(scheme=endpoint.scheme, host=endpoint.host, port=endpoint.port, target=endpoint.target)


def _failures() -> tuple[type[Exception], ...]:
    """Return the errors that end an exchange early."""
    import httpcore

    return TimeoutError, OSError, httpcore.TimeoutException, httpcore.NetworkError, httpcore.ProtocolError


@dataclass(slots=True)
class _Answer:
    """The received part of an answer."""

    status: int | None = None
    headers: Sequence[tuple[bytes, bytes]] = ()
    body: bytearray = field(default_factory=bytearray)

    def header(self, name: bytes) -> str | None:
        """Return the first header of this name."""
        return next((value.decode("latin-1") for given, value in self.headers if given.lower() == name), None)

    def excerpt(self, length: int, *, hide: RenderedRequest) -> str:
        """Return the beginning of the body, on one line, without the secrets of the request."""
        if length == 0:
            return ""
        text = self.body[:MAX_ANSWER_BYTES].decode("utf-8", "replace")
        for name, value in hide.headers:
            for word in value.decode().split() if name.lower() not in _KNOWN_TO_ALL else ():
                if len(word) >= _MIN_HIDDEN_LENGTH:
                    text = text.replace(word, "(hidden)")
        return one_line(text, length=length)


def retry_after_seconds(value: str | None, date: str | None, *, now: float) -> float | None:
    """Return the seconds of `Retry-After`, at least 0; None if it is missing or invalid.

    A date is compared with the answer's own `Date`, so that the clock of this machine does not matter; with `now` only
    if the answer has no `Date`.
    """
    if value is None:
        return None
    value = value.strip()
    if value.isascii() and value.isdigit():
        return float(value[:15])
    at = _timestamp(value)
    if at is None:
        return None
    sent_at = None if date is None else _timestamp(date)
    return max(at - (now if sent_at is None else sent_at), 0.0)


def _timestamp(text: str) -> float | None:
    try:
        at = parsedate_to_datetime(text)
        return (at if at.tzinfo is not None else at.replace(tzinfo=UTC)).timestamp()
    except (ValueError, TypeError, OverflowError, IndexError):
        return None


def _status_text(status: int) -> str:
    try:
        return f"{status} {HTTPStatus(status).phrase}"
    except ValueError:
        return str(status)
