"""The dashboard application: its routes, behind the checks of access."""

from __future__ import annotations

import contextlib
import hashlib
import mimetypes
from collections.abc import AsyncIterator, Sequence
from functools import partial
from importlib.resources import files
from typing import Final

import python_multipart  # noqa: F401 - Starlette needs it at the first form
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.types import Lifespan

from pgoutbox.dashboard import acts, pages, sign_in, status, topics
from pgoutbox.dashboard.access import Access, AccessMiddleware
from pgoutbox.dashboard.dashboard import Dashboard
from pgoutbox.dashboard.databases import Databases, routes_of
from pgoutbox.dashboard.responses import EXCEPTION_HANDLERS, STATIC, ResponseMiddleware
from pgoutbox.databases import read_databases
from pgoutbox.outbox import Outbox
from pgoutbox.settings import Settings

MAX_BODY_BYTES: Final = 65_536


def build_app(source: Outbox | Settings, *, settings: Settings | None, access: Access | None) -> Starlette:
    """See `create_app`."""
    outbox = source if isinstance(source, Outbox) else None
    if settings is None:
        settings = source.settings if isinstance(source, Outbox) else source
    routes: Sequence[BaseRoute] = [*pages.ROUTES, *acts.ROUTES, *topics.ROUTES, *status.ROUTES]
    has_many = read_databases(settings, outbox) is not None
    dashboard: Dashboard | Databases
    if has_many:
        dashboard = Databases(settings, outbox)
        routes = routes_of(dashboard, routes)
    else:
        settings.require_dsn()
        dashboard = Dashboard(settings, outbox)
    app = protect(
        routes,
        access if access is not None else Access.from_settings(settings),
        public=[Mount(STATIC[has_many].rstrip("/"), routes=_static_routes(), name="static")],
        lifespan=_lifespan,
    )
    app.state.dashboard, app.state.has_many = dashboard, has_many
    return app


def protect(
    routes: Sequence[BaseRoute],
    access: Access,
    *,
    public: Sequence[BaseRoute],
    lifespan: Lifespan[Starlette] | None = None,
) -> Starlette:
    """Build an application of these routes for the viewers that `access` lets in, and of `public` routes for everybody.

    The health check has no access control. Every other request needs a known host name and a body of limited size.
    """
    private = Mount("", routes=[*routes, *sign_in.PRIVATE_ROUTES], middleware=[Middleware(AccessMiddleware, access)])
    if access.has_sign_in:
        public = [*public, *sign_in.PUBLIC_ROUTES]
    hosts = Middleware(TrustedHostMiddleware, allowed_hosts=sorted(access.hosts) or ["*"], www_redirect=False)
    site = Mount("", routes=[*public, private], middleware=[hosts], max_body_size=MAX_BODY_BYTES)
    app = Starlette(
        routes=[Route("/healthz", _check_health), site],
        middleware=[Middleware(ResponseMiddleware)],
        exception_handlers=EXCEPTION_HANDLERS,
        lifespan=lifespan,
    )
    app.state.access, app.state.has_many = access, False
    return app


def _static_routes() -> list[Route]:
    """Return a route for each static file. They are read now: later an upgrade may replace or remove them."""
    folder = files("pgoutbox.dashboard") / "static"
    return [Route(f"/{file.name}", partial(_serve, file.name, file.read_bytes())) for file in folder.iterdir()]


async def _serve(name: str, content: bytes, request: Request) -> Response:
    etag = f'"{hashlib.sha256(content).hexdigest()}"'
    if etag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers={"etag": etag})
    return Response(content, media_type=mimetypes.guess_type(name)[0], headers={"etag": etag})


async def _check_health(request: Request) -> Response:  # noqa: ARG001 - the signature is Starlette's
    return PlainTextResponse("ok\n")


@contextlib.asynccontextmanager
async def _lifespan(app: Starlette) -> AsyncIterator[None]:
    try:
        yield
    finally:
        app.state.dashboard.close()
