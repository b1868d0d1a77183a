"""One-click unsubscribe (RFC 8058): the address of the links in the mail of lists, as an ASGI or a WSGI application.

Workers add the links to the mail of topics with a `mailing_list`, with the settings `unsubscribe.url` and
`unsubscribe.keys`. Mount one of these applications at that URL. It needs no extra and no sign-in.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from functools import cache
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from pgoutbox.errors import ConfigurationError
from pgoutbox.settings import Settings, load_settings
from pgoutbox.unsubscribe.endpoint import MAX_BODY_BYTES, Endpoint

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIEnvironment

__all__ = ["AsgiApp", "WsgiApp", "asgi_app", "wsgi_app"]

_Event: TypeAlias = MutableMapping[str, Any]
_Receive: TypeAlias = Callable[[], Awaitable[_Event]]
_Send: TypeAlias = Callable[[_Event], Awaitable[None]]
AsgiApp: TypeAlias = Callable[[_Event, _Receive, _Send], Awaitable[None]]
"""An application for servers such as uvicorn, and for `mount` of FastAPI, Starlette and Litestar."""
WsgiApp: TypeAlias = "Callable[[WSGIEnvironment, StartResponse], Iterable[bytes]]"
"""An application for servers such as gunicorn, and for werkzeug's `DispatcherMiddleware` in Flask."""

_MOST_AT_ONCE: Final = 4


def asgi_app(settings: Settings | None = None, *, otherwise: AsgiApp | None = None) -> AsgiApp:
    """Return the ASGI application of the links. Without settings it reads the environment at the first request.

    `otherwise` gets the requests of all addresses that do not begin with that of `unsubscribe.url`. Raises
    `ConfigurationError` without a database, without `unsubscribe.keys`, or if the URL has no path beside `otherwise`.

        app = FastAPI()
        app.mount("/unsubscribe", asgi_app())
    """
    endpoint = _endpoint_of(settings)
    if otherwise is not None and endpoint().place == "/":
        raise ConfigurationError("PGOUTBOX_UNSUBSCRIBE_URL: needs a path, such as /unsubscribe, beside other pages")
    turns = asyncio.Semaphore(_MOST_AT_ONCE)

    async def app(scope: _Event, receive: _Receive, send: _Send) -> None:
        is_http = scope["type"] == "http"
        if otherwise is not None and not (is_http and scope["path"].startswith(endpoint().place)):
            await otherwise(scope, receive, send)
        elif is_http:
            body = b""
            while len(body) <= MAX_BODY_BYTES:
                event = await receive()
                if event["type"] != "http.request":
                    return  # The client has gone.
                body += event.get("body", b"")
                if not event.get("more_body"):
                    break
            parts = scope["method"], scope["path"], body
            if scope["method"] == "POST":
                async with turns:  # The other threads of the application stay free, however many clicks there are.
                    answer = await asyncio.to_thread(endpoint().answer, *parts)
            else:
                answer = endpoint().answer(*parts)
            headers = [(name.lower().encode(), value.encode()) for name, value in answer.headers]
            await send({"type": "http.response.start", "status": answer.status, "headers": headers})
            await send({"type": "http.response.body", "body": answer.body})
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close"})

    return app


def wsgi_app(settings: Settings | None = None) -> WsgiApp:
    """Return the WSGI application of the links. Without settings it reads the environment at the first request.

    Raises `ConfigurationError` without a database or without `unsubscribe.keys`.

        app = Flask(__name__)
        app.wsgi_app = DispatcherMiddleware(app.wsgi_app, {"/unsubscribe": wsgi_app()})
    """
    endpoint = _endpoint_of(settings)

    def app(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        size = MAX_BODY_BYTES + 1
        if not environ.get("wsgi.input_terminated"):  # A server with it reads chunked bodies, which have no length.
            length = environ.get("CONTENT_LENGTH") or "0"
            size = min(int(length[:9]), size) if length.isascii() and length.isdecimal() else 0
        body = environ["wsgi.input"].read(size)
        answer = endpoint().answer(environ["REQUEST_METHOD"], environ.get("PATH_INFO", ""), body)
        start_response(f"{answer.status.value} {answer.status.phrase}", [*answer.headers])
        return [answer.body]

    return app


def _endpoint_of(settings: Settings | None) -> Callable[[], Endpoint]:
    """Return the endpoint of given settings. That of the environment is made later: an import needs no settings."""
    endpoint = cache(lambda: Endpoint(settings or load_settings()))
    if settings is not None:
        endpoint()
    return endpoint
