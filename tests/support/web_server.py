"""A dashboard on its own port, with the access control and the server of `pgoutbox web`, and raw requests to it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.routing import Mount, Route

from pgoutbox.dashboard import dashboard, database
from pgoutbox.dashboard.access import Access, operators_only
from pgoutbox.dashboard.app import protect
from pgoutbox.dashboard.credentials import VIEWER
from pgoutbox.dashboard.inputs import read_form
from pgoutbox.dashboard.server import Server
from tests.support import outbox_actions
from tests.support.settings import settings_with
from tests.support.waiting import PROCESS_PATIENCE_SECONDS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp, Receive, Scope, Send

    from pgoutbox.settings import Settings

CANARY: Final = "c4n4ry-s3cret"
OPERATOR_TOKEN: Final = f"operator-{CANARY}-{CANARY}"
VIEWER_TOKEN: Final = f"viewer-{CANARY}-{CANARY}"
PAGE: Final = "what the pages tell"


def web_settings(**given: object) -> Settings:
    """Return settings with the operator ada and the viewer vera."""
    tokens = {"web_operator_tokens": f"ada:{OPERATOR_TOKEN}", "web_viewer_tokens": f"vera:{VIEWER_TOKEN}"}
    return settings_with(**(tokens | given))


@dataclass
class Pages:
    """Placeholders for the pages of the dashboard, with a record of the requests."""

    forms: list[dict[str, str]] = field(default_factory=list)
    next_event: threading.Event = field(default_factory=threading.Event)

    def app(self, access: Access, *, root: str = "") -> Starlette:
        """Return an application of these pages behind `access`."""
        names = ("overview", "messages", "failed", "queues", "workers", "breakers", "topics", "audit")
        routes = [Route("/" if name == "overview" else f"/{name}", self._page, name=name) for name in names]

        @operators_only
        async def act(request: Request) -> Response:
            form = await read_form(request)
            self.forms.append(dict(form))
            return PlainTextResponse("&".join(f"{name}={value}" for name, value in form.items()))

        routes += [
            Route("/act", act, methods=["POST"]),
            Route("/broken", self._broken),
            Route("/cut", self._cut),
            Route("/live", self._live, name="live"),
        ]
        pages = protect(routes, access, public=[Route("/static/{path:path}", self._static, name="static")])
        return Starlette(routes=[Mount(root, pages)]) if root else pages

    async def _page(self, request: Request) -> Response:
        viewer = request.scope[VIEWER]
        return JSONResponse(
            {
                "page": PAGE,
                "name": viewer.name,
                "role": viewer.role,
                "origin": viewer.origin,
                "csrf": viewer.csrf_token,
            },
            headers={"Cache-Control": "public", "X-Frame-Options": "ALLOWALL"},
        )

    @staticmethod
    async def _broken(request: Request) -> Response:
        raise RuntimeError(f"postgresql://app:{CANARY}@db.internal/app")

    @staticmethod
    async def _cut(request: Request) -> Response:
        async def half() -> AsyncIterator[bytes]:
            yield b"half"
            raise RuntimeError(CANARY)

        return StreamingResponse(half())

    async def _live(self, request: Request) -> Response:
        async def events() -> AsyncIterator[bytes]:
            yield b"data: first\n\n"
            await asyncio.to_thread(self.next_event.wait, PROCESS_PATIENCE_SECONDS)
            yield b"data: second\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    @staticmethod
    async def _static(request: Request) -> Response:
        return PlainTextResponse("p {}", media_type="text/css", headers={"Cache-Control": "public, max-age=31536000"})


@contextlib.contextmanager
def serving(app: ASGIApp, settings: Settings | None = None) -> Iterator[str]:
    """Serve the application in a thread, and return its URL without the trailing slash."""
    told: list[str] = []
    started = threading.Event()

    def tell(url: str) -> None:
        told.append(url.rstrip("/"))
        started.set()

    server = Server(app, settings or web_settings(), host="127.0.0.1", port=0, started=tell)
    thread = threading.Thread(target=server.serve_until_stopped, name="dashboard")
    thread.start()
    try:
        assert started.wait(PROCESS_PATIENCE_SECONDS)
        yield told[0]
    finally:
        server.should_exit = True
        thread.join(PROCESS_PATIENCE_SECONDS)
        assert not thread.is_alive()


class HostServers:
    """Servers with the default settings that tests use one after the other, each test with an application of its own.

    Their start and stop take longer than most tests. An application keeps its server until its last request has ended.
    """

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        self._idle: list[tuple[_Host, str]] = []

    @contextlib.contextmanager
    def serving(self, app: ASGIApp) -> Iterator[str]:
        """Serve the application on a server that serves no other one, and return its URL."""
        if not self._idle:
            started = _Host()
            self._idle.append((started, self._stack.enter_context(serving(started))))
        host, url = self._idle.pop()
        host.app = app
        yield url
        host.wait_for_requests()
        self._idle.append((host, url))


class _Host:
    """An application that passes requests on to another one, and counts those that run."""

    def __init__(self) -> None:
        self.app: ASGIApp = Starlette()
        self._running = 0
        self._ended = threading.Condition()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        with self._ended:
            self._running += 1
        try:
            await self.app(scope, receive, send)
        finally:
            with self._ended:
                self._running -= 1
                self._ended.notify_all()

    def wait_for_requests(self) -> None:
        with self._ended:
            assert self._ended.wait_for(lambda: not self._running, PROCESS_PATIENCE_SECONDS), "a request has no end"


def be_patient(patch: pytest.MonkeyPatch) -> None:
    """Extend the dashboard's database timeouts and the test's patience, for slow machines."""
    for module in (database, dashboard):
        patch.setattr(module, "ANSWER_SECONDS", PROCESS_PATIENCE_SECONDS)
    patch.setattr(database, "STATEMENT_SECONDS", PROCESS_PATIENCE_SECONDS)
    patch.setattr(outbox_actions, "PATIENCE_SECONDS", 3 * PROCESS_PATIENCE_SECONDS)


class RawConnection:
    """A TCP connection to the dashboard for requests that no real client sends."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self.host = parts.netloc
        self._socket = socket.create_connection((parts.hostname, parts.port), timeout=PROCESS_PATIENCE_SECONDS)

    def __enter__(self) -> RawConnection:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._socket.close()

    def send(self, data: bytes) -> None:
        """Send these bytes."""
        self._socket.sendall(data)

    def head(self) -> str:
        """Return the status line and headers of the next response in lower case."""
        return self.read_until(b"\r\n\r\n").decode().lower()

    def rest(self) -> bytes:
        """Return all bytes until the server closes the connection."""
        found = bytearray()
        with contextlib.suppress(ConnectionResetError):
            while data := self._socket.recv(65_536):
                found += data
        return bytes(found)

    def drip_until_closed(self) -> None:
        """Send a byte whenever the server is silent for a moment. Fail if the server accepts this without end."""
        self._socket.settimeout(0.02)
        deadline = time.monotonic() + PROCESS_PATIENCE_SECONDS
        while time.monotonic() < deadline:
            try:
                if not self._socket.recv(1):
                    return
            except TimeoutError:
                with contextlib.suppress(ConnectionError):
                    self._socket.sendall(b"x")
            except ConnectionError:
                return
        pytest.fail("the server kept the connection open")

    def read_until(self, end: bytes) -> bytes:
        """Return everything up to and including `end`."""
        found = bytearray()
        while not found.endswith(end):
            byte = self._socket.recv(1)
            assert byte, f"closed after {bytes(found)!r}"
            found += byte
        return bytes(found)
