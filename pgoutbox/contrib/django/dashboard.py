"""The dashboard behind Django's own login: one view, for WSGI and ASGI.

Its pages run in an event loop of a thread that lives only during requests, so nothing is left at a fork or at the end.
They poll: under WSGI, a page that stays connected would occupy a thread.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from django.conf import settings as project
from django.contrib.auth.views import redirect_to_login
from django.core.exceptions import PermissionDenied
from django.db import transaction
from django.http import HttpRequest, HttpResponse
from django.urls import NoReverseMatch, path, reverse
from django.utils.crypto import salted_hmac
from django.views.decorators.csrf import csrf_exempt
from pydantic import SecretStr

from pgoutbox.contrib.django import outbox
from pgoutbox.dashboard import create_app

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.types import Message, Scope

    from pgoutbox.settings import Settings

_USER: Final = "pgoutbox.django.user"
_READ_BYTES: Final = 65_537  # The dashboard refuses a body of this length.
# Credentials that the dashboard does not need. With a bearer token it would not ask for the token of the form.
_HIDDEN: Final = frozenset({"authorization", "cookie"})
# Tells a page to poll, as if a newer page had replaced its stream.
_POLL: Final = b"event: replaced\ndata:\n\n"


@csrf_exempt  # The dashboard checks the origin of each form, and its own token, which only this user has.
@transaction.non_atomic_requests
def dashboard(request: HttpRequest, page: str = "") -> Any:  # noqa: ANN401 - Django has no types
    """Show a page to staff with the permission `pgoutbox.view_message`. To act, they need `pgoutbox.change_message`."""
    user = request.user
    may_act = user.has_perm("pgoutbox.change_message")
    if not (user.is_active and user.is_staff and (may_act or user.has_perm("pgoutbox.view_message"))):
        return _refuse(request)
    if page == "live":
        return HttpResponse(_POLL, content_type="text/event-stream")
    app = _app(outbox.settings)
    scope = _scope(request, page) | {_USER: (str(user.get_username()), "operator" if may_act else "viewer")}
    try:
        with app.state.portals as portal:
            return portal.call(_ask, app, scope, request.read(_READ_BYTES))
    finally:
        app.state.dashboard.database.close()  # Like Django's own: an idle one would keep a test database from its end.


def _refuse(request: HttpRequest) -> HttpResponse:
    """Send a person to the sign-in. Refuse a script, a form, and a user without the permission."""
    by_person = request.method == "GET" and request.accepts("text/html") and "X-Pgoutbox-Live" not in request.headers
    if request.user.is_authenticated or not by_person:
        raise PermissionDenied
    login_url = None
    if not project.is_overridden("LOGIN_URL"):
        with suppress(NoReverseMatch):
            login_url = reverse("admin:login")
    return redirect_to_login(request.get_full_path(), login_url)


@lru_cache(maxsize=1)
def _app(settings: Settings) -> Starlette:
    """Build the dashboard for this database. Raises `MissingExtraError` without the extra `web`."""
    from pgoutbox.dashboard import Access, Viewer  # isort: skip - it names the extra
    from anyio.from_thread import BlockingPortalProvider

    if settings.web.secret is None:  # All processes of the project accept the same forms.
        secret = SecretStr(salted_hmac(__name__, "forms", algorithm="sha256").hexdigest())
        settings = settings.model_copy(update={"web": settings.web.model_copy(update={"secret": secret})})
    access = Access.delegated(lambda request: Viewer(*request.scope[_USER]), settings)
    app = create_app(outbox, settings=settings, access=access)
    app.state.portals = BlockingPortalProvider()
    return app


def _scope(request: HttpRequest, page: str) -> dict[str, Any]:
    headers = {name.lower(): value for name, value in request.headers.items() if name.lower() not in _HIDDEN}
    headers["host"] = request.get_host()  # Raises `DisallowedHost`.
    return {
        "type": "http",
        "method": request.method,
        "scheme": request.scheme,
        "path": request.path,
        "root_path": request.path.removesuffix(page).rstrip("/"),
        "query_string": request.META.get("QUERY_STRING", "").encode("latin-1", "replace"),
        "headers": [(name.encode("latin-1"), value.encode("latin-1", "replace")) for name, value in headers.items()],
        "client": (address, 0) if (address := request.META.get("REMOTE_ADDR")) else None,
    }


async def _ask(app: Starlette, scope: Scope, body: bytes) -> HttpResponse:
    incoming = iter([{"type": "http.request", "body": body}])
    sent: asyncio.Queue[Message] = asyncio.Queue()

    async def receive() -> Message:
        return next(incoming, {"type": "http.disconnect"})

    await app(scope, receive, sent.put)
    start, *parts = [sent.get_nowait() for _ in range(sent.qsize())]
    # The connection belongs to the server.
    headers = {name.decode(): value.decode("latin-1") for name, value in start["headers"] if name != b"connection"}
    return HttpResponse(b"".join(part.get("body", b"") for part in parts), status=start["status"], headers=headers)


app_name = "pgoutbox"
urlpatterns = [path("", dashboard, name="dashboard"), path("<path:page>", dashboard)]
