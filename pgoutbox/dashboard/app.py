"""The dashboard application: its routes, behind the checks of access."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final

import python_multipart  # noqa: F401 - Starlette needs it at the first form
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from pgoutbox.dashboard import acts, pages, sign_in, topics
from pgoutbox.dashboard.access import Access, AccessMiddleware
from pgoutbox.dashboard.dashboard import Dashboard
from pgoutbox.dashboard.responses import EXCEPTION_HANDLERS, ResponseMiddleware
from pgoutbox.outbox import Outbox

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import BaseRoute
    from starlette.types import Lifespan

    from pgoutbox.settings import Settings

MAX_BODY_BYTES: Final = 65_536


def build_app(source: Outbox | Settings, *, settings: Settings | None, access: Access | None) -> Starlette:
    """See `create_app`."""
    outbox = source if isinstance(source, Outbox) else None
    if settings is None:
        settings = source.settings if isinstance(source, Outbox) else source
    settings.require_dsn()
    dashboard = Dashboard(settings, outbox)
    app = protect(
        [*pages.ROUTES, *acts.ROUTES, *topics.ROUTES],
        access if access is not None else Access.from_settings(settings),
        public=[Mount("/static", StaticFiles(packages=[("pgoutbox.dashboard", "static")]), name="static")],
        lifespan=_lifespan,
    )
    app.state.dashboard = dashboard
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
    app.state.access = access
    return app


async def _check_health(request: Request) -> Response:  # noqa: ARG001 - the signature is Starlette's
    return PlainTextResponse("ok\n")


@contextlib.asynccontextmanager
async def _lifespan(app: Starlette) -> AsyncIterator[None]:
    try:
        yield
    finally:
        app.state.dashboard.close()
