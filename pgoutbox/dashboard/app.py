"""The dashboard application: routes, access checks and error pages."""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, Final, cast

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Mount
from starlette.staticfiles import StaticFiles

from pgoutbox.dashboard import acts, pages
from pgoutbox.dashboard.access import Access, protect
from pgoutbox.dashboard.dashboard import Dashboard
from pgoutbox.dashboard.database import RefusedError, UnavailableError
from pgoutbox.dashboard.inputs import InputError
from pgoutbox.dashboard.rendering import render
from pgoutbox.dashboard.types import ROOT
from pgoutbox.errors import MessageNotFoundError, StateError
from pgoutbox.observability.events import LogEvent
from pgoutbox.outbox import Outbox

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from starlette.requests import Request
    from starlette.types import ASGIApp, Receive, Scope, Send

    from pgoutbox.settings import Settings

logger = logging.getLogger(__name__)

_HEADINGS: Final[Mapping[int, str]] = {
    403: "Not allowed",
    404: "Not found",
    405: "Not allowed",
    409: "Conflict",
    422: "Invalid input",
    503: "Unavailable",
}


def build_app(source: Outbox | Settings, *, settings: Settings | None, access: Access | None) -> Starlette:
    """See `create_app`."""
    outbox = source if isinstance(source, Outbox) else None
    if settings is None:
        settings = source.settings if isinstance(source, Outbox) else source
    settings.require_dsn()
    dashboard = Dashboard(settings, outbox)
    app = Starlette(
        routes=[
            *pages.ROUTES,
            *acts.ROUTES,
            Mount("/static", StaticFiles(packages=[("pgoutbox.dashboard", "static")]), name="static"),
        ],
        middleware=[
            Middleware(_Located),
            Middleware(protect, access if access is not None else Access.from_settings(settings)),
        ],
        exception_handlers={
            HTTPException: _answer_http,
            InputError: _answer_input,
            MessageNotFoundError: _answer_not_found,
            StateError: _answer_state,
            RefusedError: _answer_refused,
            UnavailableError: _answer_unavailable,
        },
        lifespan=_lifespan,
    )
    app.state.dashboard = dashboard
    return app


@contextlib.asynccontextmanager
async def _lifespan(app: Starlette) -> AsyncIterator[None]:
    try:
        yield
    finally:
        app.state.dashboard.close()


class _Located:
    """Stores the mount prefix of the dashboard in the scope, before its routes extend `root_path`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[ROOT] = scope.get("root_path", "").rstrip("/")
        await self._app(scope, receive, send)


async def _answer_http(request: Request, error: Exception) -> Response:
    known = cast("HTTPException", error)
    text = "page not found" if known.status_code == 404 else known.detail
    return refuse(request, known.status_code, _sentence(text), headers=known.headers)


async def _answer_input(request: Request, error: Exception) -> Response:
    return refuse(request, 422, str(error))


async def _answer_not_found(request: Request, error: Exception) -> Response:
    return refuse(request, 404, _sentence(str(error)))


async def _answer_state(request: Request, error: Exception) -> Response:
    return refuse(request, 409, _sentence(str(error)))


async def _answer_refused(request: Request, error: Exception) -> Response:
    return refuse(request, 403, _sentence(str(error)))


async def _answer_unavailable(request: Request, error: Exception) -> Response:
    logger.warning("the dashboard's database is not available", extra={"event": LogEvent.WEB_UNAVAILABLE.value})
    return refuse(request, 503, _sentence(str(error)), headers={"Retry-After": "5"})


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def refuse(request: Request, status: int, text: str, *, headers: Mapping[str, str] | None = None) -> Response:
    """Return an error response: a page for a browser, a line of text for other clients."""
    if "text/html" not in request.headers.get("accept", ""):
        return PlainTextResponse(f"{text}\n", status_code=status, headers=headers)
    context = {"status": status, "heading": _HEADINGS.get(status, "Refused"), "text": text}
    return render(request, "refusal.html", context, status=status, headers=headers)
