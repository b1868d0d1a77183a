"""The transport that sends webhooks, and never to an address that is not public.

A name is resolved once for each connection, all of its addresses are checked, and one of the checked addresses is
dialled; the certificate must still be for the name. There are no proxies, no cookies and no redirects. Only the status
of an answer is recorded, unless the settings ask for an excerpt.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC
from email.utils import parsedate_to_datetime
from functools import cached_property, lru_cache, partial
from hashlib import blake2b
from http import HTTPStatus
from importlib.util import find_spec
from typing import TYPE_CHECKING

from pgoutbox.errors import MissingExtraError
from pgoutbox.message import Message, Outcome, Permanent, SendFailure, Sent, Unavailable
from pgoutbox.observability.events import LogEvent, Telemetry
from pgoutbox.observability.tracing import current_context
from pgoutbox.text import one_line
from pgoutbox.transports import breaker_key_of, pass_gate
from pgoutbox.transports.tls import resume_sessions, verifying_context
from pgoutbox.transports.webhook.request import RenderedRequest, Rules, Webhook, render, secret_key

if TYPE_CHECKING:
    from pgoutbox.settings import Settings
    from pgoutbox.transports import Content
    from pgoutbox.transports.webhook.connection import Answer, Connection
    from pgoutbox.transports.webhook.url_policy import Endpoint

_telemetry = Telemetry(logging.getLogger("pgoutbox.transports.webhook"))

IDLE_SECONDS = 30.0
_MAX_RESOLVER_THREADS = 32
_MAX_DIALLED_ADDRESSES = 4
_MIN_HIDDEN_LENGTH = 6
_KNOWN_TO_ALL = frozenset({b"host", b"content-type", b"content-length", b"accept-encoding", b"idempotency-key"})
_STATUS_TEXTS = {status.value: f"{status.value} {status.phrase}" for status in HTTPStatus}
_TRANSIENT_STATUSES = frozenset({408, 425, 429})
_HOST_STATUSES = frozenset({502, 503, 504})


class WebhookTransport:
    """Sends `Webhook` to the URL that the message or the content names.

    At most `webhook.connections` requests run at once; connections are reused while they are fresh. One deadline covers
    the whole exchange. TLS 1.2 or newer is verified against the CAs of the system and `webhook.ca_file`. `clock`, in
    seconds since 1970, gives the time of signatures.

    Raises `ConfigurationError` when a setting is unusable, `MissingExtraError` without h11.
    """

    def __init__(self, settings: Settings, *, clock: Callable[[], float] = time.time) -> None:
        if find_spec("h11") is None:  # The first connection imports it.
            raise MissingExtraError("the webhook transport", "webhook")
        self._settings = settings.webhook
        self._clock = clock
        self._rules = Rules.of(self._settings)
        if self._settings.ca_file is not None:
            _ = self._tls  # An unreadable file is reported at the start.
        self._connect_seconds = min(self._settings.connect_timeout_seconds, self._settings.timeout_seconds)
        self._slots = asyncio.Semaphore(self._settings.connections)
        self._idle: dict[Connection, None] = {}  # The least recently used is first.
        # Separate threads: a slow name server of a receiver must not delay other look-ups of this process.
        thread_count = min(self._settings.connections, _MAX_RESOLVER_THREADS)
        self._resolver = ThreadPoolExecutor(thread_count, "pgoutbox-resolver")

    @property
    def schemes(self) -> tuple[str, ...]:
        """`https`, and `http` if the settings allow it."""
        return ("https", "http") if self._settings.allow_http else ("https",)

    async def send(self, message: Message[object], content: Content) -> Outcome:
        """Send the request once and classify the answer.

        `Sent` means that the receiver answered 2xx. `Permanent` names the wrong field, or the answer that no repetition
        changes. Refused credentials (401) are `Unavailable`, for this URL alone. Other failures are `Transient`; those
        with the status 403 or 5xx count for this URL alone, except 502, 503 and 504, which count for the host. If the
        connection breaks after the request was sent, the outcome is unknown: the next attempt may be a duplicate, with
        the same `webhook-id`.
        """
        if not isinstance(content, Webhook):
            return Permanent(f"content: the webhook transport sends a Webhook, not {type(content).__name__}")
        try:
            context = current_context() if self._settings.trace_context else None
            request = render(content, message, self._rules, context)
            async with self._slots:
                answer = await self._exchange(request)
        except (Permanent, SendFailure, Unavailable) as outcome:
            return outcome
        return self._classify(request, answer, message, content)

    def breaker_key(self, message: Message[object], content: Content | None) -> str | None:
        """Return a key for each scheme, host and port."""
        return breaker_key_of(_url(message, content))

    def part_keys(self, message: Message[object], content: Content) -> Sequence[str]:
        """Return the keys of this URL and, if it signs the request, of the secret of the settings."""
        if not isinstance(content, Webhook):
            return ()
        secret = secret_key(content)
        return (_url_key(_url(message, content)), *(() if secret is None else (secret,)))

    async def aclose(self) -> None:
        """Close every connection."""
        while self._idle:
            self._idle.popitem()[0].close()
        self._resolver.shutdown(wait=False, cancel_futures=True)

    async def _exchange(self, request: RenderedRequest) -> Answer:
        """Send the request, signed for this second, and return the answer with a limited part of its body.

        Raises `SendFailure` without an answer, and `Permanent` if an address of the host is forbidden.
        """
        now = asyncio.get_running_loop().time()
        until = now + self._settings.timeout_seconds
        connection = answer = None
        try:
            connection = await self._ready_connection(request.endpoint, now, until)
            answer = connection.send(request.signed_bytes(int(self._clock())), until=until)
            await answer.ended
        except (OSError, EOFError) as error:
            if answer is None:
                text = _reason(error) or f"no connection within {self._connect_seconds:g} s"
                raise SendFailure(f"connect: {one_line(text)}", outage=True) from None
            if answer.status is None:
                texts = {  # Those of the libraries would quote the receiver's data.
                    EOFError: "the connection was closed without an answer, or the answer is not HTTP",
                    TimeoutError: f"no answer within {self._settings.timeout_seconds:g} s",
                }
                text = texts.get(type(error), "the connection was lost")
                raise SendFailure(f"outcome unknown: {text}", outage=True, unknown=True) from None
        finally:
            if connection is not None:
                self._keep_or_close(connection)
        return answer

    async def _ready_connection(self, endpoint: Endpoint, now: float, until: float) -> Connection:
        """Return a connection that has passed the gate. One that died while it was idle is replaced.

        Raises `TimeoutError` after `until`.
        """
        loop = asyncio.get_running_loop()
        while True:
            connection = idle = self._take_idle(endpoint, now)
            if connection is None:
                async with asyncio.timeout_at(min(loop.time() + self._connect_seconds, until)):
                    connection = await self._dial(endpoint)
            try:
                await pass_gate()
                if loop.time() >= until:
                    raise TimeoutError  # noqa: TRY301 - as if the connection had taken so long
                if idle is None or connection.is_silent():
                    return connection
            except BaseException:
                connection.close()
                raise
            connection.close()

    def _take_idle(self, endpoint: Endpoint, now: float) -> Connection | None:
        """Return the most recently used connection to this host and port."""
        while self._idle and (oldest := next(iter(self._idle))).idle_at < now - IDLE_SECONDS:
            del self._idle[oldest]
            oldest.close()
        for connection in reversed(self._idle):
            if connection.origin == endpoint.origin:
                del self._idle[connection]
                return connection
        return None

    def _keep_or_close(self, connection: Connection) -> None:
        """Keep the connection if its exchange is complete on both sides, also after a cancellation. Else close it."""
        if connection.end_exchange():
            self._idle[connection] = None
            if len(self._idle) <= self._settings.connections:
                return
            connection = next(iter(self._idle))
            del self._idle[connection]
        connection.close()

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        """Read the CAs of the system for the first TLS connection: it takes 30 ms, and a worker may send nothing."""
        tls = verifying_context(variable="PGOUTBOX_WEBHOOK_CA_FILE", ca_file=self._settings.ca_file)
        tls.set_alpn_protocols(["http/1.1"])
        resume_sessions(tls)
        return tls

    async def _dial(self, endpoint: Endpoint) -> Connection:
        """Connect to a checked address, and shake hands. The addresses are tried in turn."""
        from pgoutbox.transports.webhook.connection import Connection

        new = partial(Connection, endpoint.origin)
        loop = asyncio.get_running_loop()
        tls, host = (self._tls, endpoint.host) if endpoint.scheme == "https" else (None, None)
        addresses = self._checked(endpoint.host, await loop.run_in_executor(self._resolver, _look_up, endpoint))
        failure = OSError("the host has no address")
        for address in addresses:
            try:
                async with asyncio.timeout(self._connect_seconds / len(addresses)):
                    return (await loop.create_connection(new, address, endpoint.port, ssl=tls, server_hostname=host))[1]
            except OSError as error:
                failure = error
        raise failure

    def _checked(self, host: str, addresses: Sequence[str]) -> Sequence[str]:
        """Return the addresses to try. Raises `Permanent` if one of the host's addresses is not allowed.

        Then the others are not tried, because the next look-up may return another order.
        """
        for address in addresses:
            if not self._rules.policy.allows(address):
                # Only for the operator: it would reveal details of the network to the author of the URL.
                text = "a webhook to an address that is not public was refused"
                _telemetry.report(logging.WARNING, LogEvent.WEBHOOK_ADDRESS_REFUSED, text, host=host, address=address)
                raise Permanent(
                    f"{host}: is not in the public internet, nor in a network that "
                    "PGOUTBOX_WEBHOOK_ALLOWED_NETWORKS allows"
                )
        return addresses[:_MAX_DIALLED_ADDRESSES]

    def _classify(
        self, request: RenderedRequest, answer: Answer, message: Message[object], content: Webhook
    ) -> Outcome:
        status = answer.status or 0
        if 200 <= status <= 299:
            return Sent()
        url = _url(message, content)
        error = _STATUS_TEXTS.get(status, str(status))
        if 300 <= status <= 399:
            return Permanent(f"{error}: redirects are not followed; change the destination")
        if excerpt := self._excerpt(answer, request):
            error = f"{error}: {excerpt}"
        if status == HTTPStatus.UNAUTHORIZED:
            return Unavailable(error, breaker=_url_key(url))
        is_outage = status == HTTPStatus.FORBIDDEN or 500 <= status <= 599
        if is_outage or status in _TRANSIENT_STATUSES:
            # A gateway speaks for its host. Other receivers at the host may accept what this URL refuses.
            breaker = None if status in _HOST_STATUSES else _url_key(url)
            return SendFailure(error, retry_after=self._retry_after(answer), outage=is_outage, breaker=breaker)
        return Permanent(error)

    def _retry_after(self, answer: Answer) -> float | None:
        asked = retry_after_seconds(answer.header(b"retry-after"), answer.header(b"date"), now=self._clock())
        return None if asked is None else min(asked, self._settings.retry_after_cap_seconds)

    def _excerpt(self, answer: Answer, request: RenderedRequest) -> str:
        """Return the beginning of the body, on one line, without the secrets of the request."""
        if self._settings.error_body_chars == 0:
            return ""
        text = answer.body.decode("utf-8", "replace")
        for name, value in request.headers:
            for word in value.decode().split() if name.lower() not in _KNOWN_TO_ALL else ():
                if len(word) >= _MIN_HIDDEN_LENGTH:
                    text = text.replace(word, "(hidden)")
        return one_line(text, length=self._settings.error_body_chars)


def _look_up(endpoint: Endpoint) -> Sequence[str]:
    found = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


def _reason(error: Exception) -> str:
    """Return the system's words, without the address that asyncio adds."""
    if isinstance(error, OSError) and error.errno and not isinstance(error, ssl.SSLError | socket.gaierror):
        return os.strerror(error.errno)
    return str(error)


def _url(message: Message[object], content: Content | None) -> str:
    return (content.url if isinstance(content, Webhook) else None) or message.destination or ""


@lru_cache(1_024)
def _url_key(url: str) -> str:
    # Receivers may share a host, and a URL may contain a token: its digest tells them apart.
    return f"{breaker_key_of(url)} url {blake2b(url.encode(), digest_size=4).hexdigest()}"


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
