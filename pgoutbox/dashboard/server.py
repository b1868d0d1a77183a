"""Serves the dashboard with uvicorn, with limits on request time, request size and connections."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Callable
from types import FrameType
from typing import Final

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from pgoutbox.dashboard.responses import SECURITY_HEADERS, TELEMETRY
from pgoutbox.observability.connection_limit import ConnectionLimit
from pgoutbox.observability.events import LogEvent
from pgoutbox.settings import Settings

MAX_HEAD_BYTES: Final = 32_768
REQUEST_SECONDS: Final = 10.0
_KEEP_ALIVE_SECONDS: Final = 5
_GRACE_SECONDS: Final = 3


def _fixed_answer(status: str, text: str) -> bytes:
    headers = {
        **SECURITY_HEADERS,
        "cache-control": "no-store",
        "content-type": "text/plain; charset=utf-8",
        "content-length": str(len(text)),
        "connection": "close",
    }
    lines = [f"HTTP/1.1 {status}", *(f"{name}: {value}" for name, value in headers.items()), "", text]
    return "\r\n".join(lines).encode()


_FULL: Final = _fixed_answer("503 Service Unavailable", "Too many connections.\n")
_MALFORMED: Final = _fixed_answer("400 Bad Request", "Not a valid HTTP request.\n")


class _RequestTimeoutProtocol(H11Protocol):
    """uvicorn's protocol with a timeout for the arrival of each request, and a limit on connections.

    uvicorn itself has no timeout for the head of a request, and refuses connections without our headers.
    """

    limit: ConnectionLimit[_RequestTimeoutProtocol]
    request_seconds = REQUEST_SECONDS
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if not self.limit.admit(self):
            transport.write(_FULL)
            transport.close()
            return
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        self.limit.forget(self)
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 - the name is uvicorn's
        self.transport.write(_MALFORMED)
        self.transport.close()

    def _watch(self) -> None:
        arriving = self.conn.their_state in (h11.IDLE, h11.SEND_BODY)
        if not arriving or self.transport.is_closing():
            self._forget()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(self.request_seconds, self.transport.abort)
            self.limit.mark_waiting(self)

    def _forget(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
            self.limit.mark_arrived(self)


class Server(uvicorn.Server):
    """A server of the dashboard on its own address; port 0 means any free port.

    Raises `OSError` if the address is not available. Calls `started` with the URL when it accepts connections.
    """

    def __init__(
        self, app: ASGIApp, settings: Settings, *, host: str, port: int, started: Callable[[str], object]
    ) -> None:
        self._listener = _listen(host, port)
        self._when_started = started
        proxies = [part.strip() for part in (settings.web.trusted_proxies or "").split(",") if part.strip()]
        limit = ConnectionLimit[_RequestTimeoutProtocol](settings.web.connections, lambda one: one.transport.abort())
        protocol = type("Protocol", (_RequestTimeoutProtocol,), {"limit": limit})
        super().__init__(
            uvicorn.Config(
                app,
                http=protocol,
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=bool(proxies),
                forwarded_allow_ips=proxies,
                timeout_keep_alive=_KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=_GRACE_SECONDS,
                h11_max_incomplete_event_size=MAX_HEAD_BYTES,
            )
        )

    def serve_until_stopped(self) -> None:
        """Serve until SIGTERM or SIGINT, or until `should_exit` is set."""
        with self._listener:
            self.run(sockets=[self._listener])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start like uvicorn, then report the URL."""
        await super().startup(sockets)
        if self.started:
            url = _url(self._listener)
            TELEMETRY.report(logging.INFO, LogEvent.WEB_STARTED, "the dashboard is served", url=url)
            self._when_started(url)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002 - the signature is uvicorn's
        """Shut down like uvicorn, but do not raise the signal again afterwards."""
        self.force_exit |= self.should_exit and sig == signal.SIGINT
        self.should_exit = True


def _listen(host: str, port: int) -> socket.socket:
    (family, _, _, _, address), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    is_dual = family is socket.AF_INET6 and socket.has_dualstack_ipv6()
    return socket.create_server(address, family=family, dualstack_ipv6=is_dual)


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"
