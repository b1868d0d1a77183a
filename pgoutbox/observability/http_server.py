"""A small HTTP server in threads, for probes and scrapes: it answers while the application's event loop is blocked.

It accepts only GET and HEAD without bodies, and one request for each connection. The number of connections is limited,
and each has a deadline. Needs the extra `metrics`.
"""

from __future__ import annotations

import contextlib
import io
import socket
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from typing import Final

from pgoutbox.errors import NotReadyError
from pgoutbox.observability.connection_limit import ConnectionLimit
from pgoutbox.observability.prometheus import Page

_MAX_CONNECTIONS: Final = 32
_DEADLINE_SECONDS: Final = 10.0
_MAX_HEAD_BYTES: Final = 16_384
_TEXT: Final = "text/plain; charset=utf-8"

Answer = Callable[[str, str | None], Page | None]
"""Called with the path and the header `Accept`, in any thread. None means that the page does not exist."""


class HttpServer(ThreadingTCPServer):
    """Serves what `answer` returns, in threads of its own, until `stop`.

    Raises `NotReadyError` if the address is not available.
    """

    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, host: str, port: int, answer: Answer) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.answer = answer
        self.connections: ConnectionLimit[socket.socket] = ConnectionLimit(_MAX_CONNECTIONS, _abort)
        try:
            super().__init__((host, port), _Handler)
        except OSError as error:
            raise NotReadyError(
                f"PGOUTBOX_METRICS_ADDRESS: cannot listen on {host} port {port}: {error.strerror or error}"
            ) from None
        threading.Thread(target=self.serve_forever, name="pgoutbox-http", daemon=True).start()

    @property
    def port(self) -> int:
        """The port on which the server listens."""
        return int(self.server_address[1])

    def stop(self) -> None:
        """End the thread and close every connection."""
        self.shutdown()
        self.server_close()
        self.connections.close_older_than(0)

    def verify_request(self, request: socket.socket, client_address: object) -> bool:  # type: ignore[override] # noqa: ARG002
        """Register a connection; return False if there is no room for it."""
        return self.connections.admit(request)

    def service_actions(self) -> None:
        """Close connections at their deadline. Called several times a second."""
        self.connections.close_older_than(_DEADLINE_SECONDS)

    def shutdown_request(self, request: socket.socket) -> None:  # type: ignore[override]
        """Close a connection after its response."""
        self.connections.forget(request)
        super().shutdown_request(request)


def _abort(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)  # Its thread wakes up and closes it.


class _Handler(BaseHTTPRequestHandler):
    server: HttpServer
    protocol_version = default_request_version = "HTTP/1.1"

    def handle(self) -> None:
        """Answer one request."""
        with contextlib.suppress(OSError):  # The client may disconnect.
            self.rfile = io.BytesIO(self._read_head())
            self.server.connections.mark_arrived(self.connection)
            self.handle_one_request()

    def _read_head(self) -> bytes:
        """Return the head of the request; nothing if it is too long or the client has disconnected."""
        head = b""
        while len(head) < _MAX_HEAD_BYTES and (data := bytes(self.connection.recv(_MAX_HEAD_BYTES))):
            head += data
            if b"\r\n\r\n" in head or b"\n\n" in head:
                return head
        return b""

    def do_GET(self) -> None:
        page = self.server.answer(self.path.partition("?")[0], self.headers.get("accept"))
        self._respond(page or Page(404, _TEXT, b"no such page\n"))

    do_HEAD = do_GET  # noqa: N815 - the name is http.server's

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:  # noqa: ARG002
        """Refuse a request. The standard library would send its version and repeat the request."""
        status = HTTPStatus(405 if code == HTTPStatus.NOT_IMPLEMENTED else code)
        self._respond(Page(status, _TEXT, f"{status.phrase}\n".encode()))

    def _respond(self, page: Page) -> None:
        self.send_response_only(page.status)
        self.send_header("Content-Type", page.content_type)
        self.send_header("Content-Length", str(len(page.body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Connection", "close")
        if page.status == HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", "GET, HEAD")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(page.body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name is http.server's
        """Do not log requests."""
