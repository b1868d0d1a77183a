"""One-click unsubscribe (RFC 8058): the address of the links in the mail of lists, as an ASGI or a WSGI application.

Workers add the links to the mail of topics with a `mailing_list`, with the settings `unsubscribe.url` and
`unsubscribe.keys`. Mount one of these applications at that URL. It needs no extra and no sign-in.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from functools import cache
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from pgoutbox.settings import Settings, load_settings
from pgoutbox.unsubscribe.endpoint import MAX_BODY_BYTES, Answer, Endpoint, Texts

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIEnvironment

__all__ = ["AsgiApp", "Texts", "WsgiApp", "asgi_app", "wsgi_app"]

_Event: TypeAlias = MutableMapping[str, Any]
_Receive: TypeAlias = Callable[[], Awaitable[_Event]]
_Send: TypeAlias = Callable[[_Event], Awaitable[None]]
AsgiApp: TypeAlias = Callable[[_Event, _Receive, _Send], Awaitable[None]]
"""An application for servers such as uvicorn, and for `mount` of FastAPI, Starlette and Litestar."""
WsgiApp: TypeAlias = "Callable[[WSGIEnvironment, StartResponse], Iterable[bytes]]"
"""An application for servers such as gunicorn, and for werkzeug's `DispatcherMiddleware` in Flask."""

_TEXTS: Final = Texts()
_MOST_CLICKS: Final = 200


def asgi_app(settings: Settings | None = None, *, texts: Texts = _TEXTS, otherwise: AsgiApp | None = None) -> AsgiApp:
    """Return the ASGI application of the links. Without settings it reads the environment at the first request.

    `otherwise` gets the requests of all addresses that do not begin with that of `unsubscribe.url`. Raises
    `ConfigurationError` without a database or without `unsubscribe.keys`.

        app = FastAPI()
        app.mount("/unsubscribe", asgi_app())
    """
    endpoint = _endpoint_of(settings, texts)

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
            answer = await _answer(endpoint(), scope["method"], scope["path"], body)
            headers = [(name.lower().encode(), value.encode()) for name, value in _headers_of(answer)]
            await send({"type": "http.response.start", "status": answer.status, "headers": headers})
            await send({"type": "http.response.body", "body": answer.body})
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close"})

    return app


def wsgi_app(settings: Settings | None = None, *, texts: Texts = _TEXTS) -> WsgiApp:
    """Return the WSGI application of the links. Without settings it reads the environment at the first request.

    Raises `ConfigurationError` without a database or without `unsubscribe.keys`.

        app = Flask(__name__)
        app.wsgi_app = DispatcherMiddleware(app.wsgi_app, {"/unsubscribe": wsgi_app()})
    """
    endpoint = _endpoint_of(settings, texts)

    def app(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        length = environ.get("CONTENT_LENGTH") or "0"
        size = min(int(length), MAX_BODY_BYTES + 1) if length.isascii() and length.isdecimal() else 0
        body = environ["wsgi.input"].read(size)
        answer = endpoint().answer(environ["REQUEST_METHOD"], environ.get("PATH_INFO", ""), body)
        start_response(f"{answer.status.value} {answer.status.phrase}", _headers_of(answer))
        return [answer.body]

    return app


async def _answer(endpoint: Endpoint, method: str, path: str, body: bytes) -> Answer:
    if method != "POST":
        return endpoint.answer(method, path, body)
    # The threads of the application stay free, however many clicks there are.
    if len(endpoint.clicks) >= _MOST_CLICKS:
        return endpoint.busy()
    click = asyncio.get_running_loop().run_in_executor(endpoint.threads, endpoint.answer, method, path, body)
    endpoint.clicks.add(click)
    click.add_done_callback(endpoint.clicks.discard)
    return await asyncio.shield(click)


def _endpoint_of(settings: Settings | None, texts: Texts) -> Callable[[], Endpoint]:
    """Return the endpoint of given settings. That of the environment is made later: an import needs no settings."""
    endpoint = cache(lambda: Endpoint(settings or load_settings(), texts))
    if settings is not None:
        endpoint()
    return endpoint


def _headers_of(answer: Answer) -> list[tuple[str, str]]:
    return [*answer.headers.items(), ("Content-Length", str(len(answer.body)))]
