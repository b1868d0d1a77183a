"""Responses of the dashboard: security headers, refusals and error pages, which reveal no more than they must."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Mapping
from functools import partial
from typing import Any, Final

from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pgoutbox.dashboard.database import RefusedError, UnavailableError
from pgoutbox.dashboard.rendering import ROOT, render
from pgoutbox.errors import ArgumentError, MessageNotFoundError, PgOutboxError, StateError
from pgoutbox.observability.events import LogEvent, Telemetry

_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; form-action 'self'; "
    "frame-ancestors 'none'; base-uri 'none'"
)
SECURITY_HEADERS: Final[Mapping[str, str]] = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=(), payment=(), usb=()",
}
_HEADINGS: Final[Mapping[int, str]] = {
    400: "Bad request",
    401: "Not signed in",
    403: "Not allowed",
    404: "Not found",
    405: "Not allowed",
    409: "Conflict",
    415: "Not a form",
    422: "Invalid input",
    429: "Too many attempts",
    500: "Something went wrong",
    503: "Unavailable",
}
STATIC: Final = ("/static/", "/~static/")
"""The path of static files with one database, and with many: no database can have its name."""
# Starlette's default texts.
_TEXTS: Final = {"Forbidden": "this page needs the role operator", "Not Found": "page not found"}

TELEMETRY: Final = Telemetry(logging.getLogger("pgoutbox.dashboard"))


class ResponseMiddleware:
    """Adds the security headers to every response, and answers failures without details.

    Stores the mount prefix in the scope, before the routes extend `root_path`. Works on a copy of the scope, so that a
    host application keeps its own user.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope = {**scope, ROOT: scope.get("root_path", "").rstrip("/")}
        request, has_begun = Request(scope, receive), False

        async def send_safely(message: Message) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                _protect(request, message)
            await send(message)

        try:
            await self._app(scope, receive, send_safely)
        except ClientDisconnect:
            return
        except Exception as error:  # noqa: BLE001 - the answer must not reveal the error
            # Log neither the text nor the traceback: errors of the driver quote values of rows.
            TELEMETRY.report(
                logging.ERROR,
                LogEvent.WEB_PAGE_FAILED,
                "a page failed",
                path=path_of(request),
                error_type=type(error).__name__,
                error_place=_place_of(error),
            )
        else:
            return
        # Outside of `except`: the traceback of an error in this page must not quote the first error.
        if not has_begun:  # Otherwise the server detects the incomplete answer, and closes the connection.
            failed = refuse(request, 500, "The dashboard failed. See its log for the error.")
            await failed(scope, receive, send_safely)


def _protect(request: Request, message: Message) -> None:
    headers = MutableHeaders(scope=message)
    headers.update(SECURITY_HEADERS)
    is_static = path_of(request).startswith(STATIC[request.app.state.has_many]) and request.method in ("GET", "HEAD")
    if not (is_static and message["status"] in (200, 304)):
        headers["cache-control"] = "no-store"
    if message["status"] >= 400 and request.method not in ("GET", "HEAD"):
        headers["connection"] = "close"  # The body may be unread.


def path_of(request: Request) -> str:
    """Return the path below the mount prefix."""
    path: str = request.scope["path"]
    return path.removeprefix(request.scope[ROOT])


def refuse(request: Request, status: int, text: str, *, headers: Mapping[str, str] | None = None) -> Response:
    """Return an error response: a page for a browser, a line of text for other clients."""
    if "text/html" not in request.headers.get("accept", ""):
        return PlainTextResponse(f"{text}\n", status_code=status, headers=headers)
    context = {"status": status, "heading": _HEADINGS.get(status, "Refused"), "text": text}
    return render(request, "refusal.html", context, status=status, headers=headers)


async def _answer_http(request: Request, error: HTTPException) -> Response:
    text = _TEXTS.get(error.detail, error.detail)
    return refuse(request, error.status_code, sentence(text), headers=error.headers)


async def _answer_error(status: int, request: Request, error: PgOutboxError) -> Response:
    return refuse(request, status, str(error) if isinstance(error, ArgumentError) else sentence(str(error)))


async def _answer_unavailable(request: Request, error: UnavailableError) -> Response:
    TELEMETRY.report(logging.WARNING, LogEvent.WEB_UNAVAILABLE, "the dashboard's database is not available")
    return refuse(request, 503, sentence(str(error)), headers={"Retry-After": "5"})


EXCEPTION_HANDLERS: Final[Mapping[Any, Any]] = {
    HTTPException: _answer_http,
    ArgumentError: partial(_answer_error, 422),
    MessageNotFoundError: partial(_answer_error, 404),
    StateError: partial(_answer_error, 409),
    RefusedError: partial(_answer_error, 403),
    UnavailableError: _answer_unavailable,
}


def sentence(text: str) -> str:
    """Return the text of an error as a sentence."""
    return f"{text[:1].upper()}{text[1:]}."


def _place_of(error: BaseException) -> str:
    *_, (frame, line) = traceback.walk_tb(error.__traceback__)
    return f"{frame.f_globals.get('__name__', '?')}:{line}"
