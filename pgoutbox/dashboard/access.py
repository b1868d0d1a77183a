"""Authentication, authorisation and CSRF protection of the dashboard.

`AccessMiddleware` wraps all pages. It identifies the viewer, and accepts a POST only from one of our own forms.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
import re
import secrets
from collections import deque
from collections.abc import Awaitable, Callable, Collection
from typing import Any, Final, Self, TypeAlias, get_args
from urllib.parse import quote, urlsplit

from starlette.authentication import AuthCredentials, requires
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pgoutbox.dashboard.credentials import (
    SESSION,
    VIEWER,
    Credentials,
    Person,
    RateLimiter,
    Role,
    Session,
    Sessions,
    Viewer,
    people_of,
)
from pgoutbox.dashboard.inputs import read_form
from pgoutbox.dashboard.rendering import ROOT
from pgoutbox.dashboard.responses import TELEMETRY, path_of
from pgoutbox.errors import ConfigurationError
from pgoutbox.observability.events import LogEvent
from pgoutbox.settings import Settings

__all__ = ["LOOPBACK_NAMES", "Access", "AccessMiddleware", "Authenticate", "Role", "Viewer", "operators_only"]

LOOPBACK_NAMES: Final = frozenset({"localhost", "127.0.0.1", "[::1]"})
_LIVE_HEADER: Final = "x-pgoutbox-live"

Authenticate: TypeAlias = Callable[[Request], "Viewer | Awaitable[Viewer | None] | None"]

operators_only: Final = requires("operator")
"""Allow only operators on a page; others get 403."""


class Access:
    """How viewers are identified: by the settings, by the host application, or not at all.

    One `Access` holds the sessions and the rate limits on sign-in of one process.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        people: Collection[Person] = (),
        authenticate: Authenticate | None = None,
        hosts: Collection[str] = (),
    ) -> None:
        given = settings.web.secret
        self.credentials: Final = Credentials(tuple(people))
        self.sessions: Final = Sessions(
            self.credentials,
            secret=given.get_secret_value() if given is not None else secrets.token_urlsafe(32),
            idle_seconds=settings.web.session_idle_seconds,
            max_seconds=settings.web.session_max_seconds,
        )
        self.authenticate: Final = authenticate
        self._is_open_to_all = False
        self.has_sign_in: Final = bool(people)
        named = [name.strip().lower() for name in (settings.web.hosts or "").split(",") if name.strip()]
        self.hosts: Final = frozenset(hosts) | frozenset(named)
        # Wrong tries per address: five at once, then one per 12 s. For all addresses together: one per second.
        self.address_limit: Final = RateLimiter(burst=5, interval_seconds=12)
        self.common_limit: Final = RateLimiter(burst=60, interval_seconds=1, capacity=1)
        # Addresses that have signed in with a password: guesses from elsewhere do not lock them out.
        self._known_addresses: Final[deque[str]] = deque(maxlen=1_000)

    @classmethod
    def from_settings(cls, settings: Settings, *, hosts: Collection[str] = ()) -> Self:
        """Accept the tokens and passwords of `web.viewer_tokens` and `web.operator_tokens`.

        Answers only the host names in `web.hosts` and `hosts`; if both are empty, every name. Raises
        `ConfigurationError` if there are no credentials.
        """
        people = people_of(settings)
        if not people:
            raise ConfigurationError(
                "the dashboard has no credentials: set PGOUTBOX_WEB_OPERATOR_TOKENS or PGOUTBOX_WEB_VIEWER_TOKENS, for "
                "example to the output of: python -c 'import secrets; print(secrets.token_urlsafe(32))'"
            )
        return cls(settings, people=people, hosts=hosts)

    @classmethod
    def delegated(cls, authenticate: Authenticate, settings: Settings) -> Self:
        """Use the host application's sign-in: `authenticate(request)`, sync or async, returns the viewer.

        Return `Viewer(name, role)`, or None to answer with 401. An empty name or an unknown role is answered with 403.
        With several processes, set `web.secret`, so that each accepts the forms of the others.
        """
        return cls(settings, authenticate=authenticate)

    @classmethod
    def open_to_all(cls, role: Role, settings: Settings, *, hosts: Collection[str] = LOOPBACK_NAMES) -> Self:
        """Require no sign-in: every request has this role. For your own machine only."""
        access = cls(settings, authenticate=lambda _: Viewer("anyone", role), hosts=hosts)
        access._is_open_to_all = True
        return access

    async def identify(self, request: Request) -> Viewer | None:
        """Return the viewer, or None if nobody has signed in. The forms of a browser need the viewer's CSRF token."""
        origin = f"web {address_of(request)}"
        # Without sign-in no token is checked, so none replaces the check of the form.
        token = None if self._is_open_to_all else _bearer_of(request)
        if self.authenticate is not None:
            answered = self.authenticate(request)
            viewer = await answered if inspect.isawaitable(answered) else answered
            if viewer is None:
                raise HTTPException(401, "sign in to the application first")
            if not viewer.name.strip() or viewer.role not in get_args(Role):
                text = f"the application signed you in as {viewer.name!r} with the role {viewer.role!r}"
                raise HTTPException(403, f"{text}: it must give a name, and the role viewer or operator")
            csrf_token = self.sessions.csrf_token(viewer.role, viewer.name) if token is None else ""
            return dataclasses.replace(viewer, csrf_token=csrf_token, origin=viewer.origin or origin)
        if token is not None:
            person = await self.check_secret(request, token)
            return Viewer(person.name, person.role, origin=origin)
        session = self.sessions.open(request.cookies.get(cookie_of(request)["key"], ""))
        if session is None:
            return None
        request.scope[SESSION] = session
        csrf_token = self.sessions.csrf_token(session.id)
        return Viewer(session.person.name, session.person.role, csrf_token, origin)

    async def check_secret(self, request: Request, secret: str, *, name: str | None = None) -> Person:
        """Return the owner of a token, or with `name` also of a password.

        Raises `HTTPException`: 401 if the secret is wrong, 429 above the rate limit.
        """
        # A valid token is never rate-limited: others may share its address, and it is too long to be guessed.
        person = self.credentials.by_token(secret)
        if person is None:
            address = address_of(request)
            attempts = [(self.address_limit, address)]
            if name is not None and address not in self._known_addresses:
                attempts.append((self.common_limit, "all"))
            for limiter, key in attempts:
                if (wait_seconds := limiter.take(key)) > 0:
                    self._report(request, LogEvent.WEB_SIGN_IN_BRAKED, "too many sign-in attempts")
                    headers = {"Retry-After": str(int(wait_seconds) + 1)}
                    raise HTTPException(429, "too many sign-in attempts: wait a moment, then try again", headers)
            person = await self.credentials.identify(name, secret) if name is not None else None
            if person is None:
                # Do not log the typed name: it may be a password.
                self._report(request, LogEvent.WEB_SIGN_IN_REFUSED, "sign-in failed")
                headers = {"WWW-Authenticate": 'Bearer error="invalid_token"'}
                raise HTTPException(401, "sign-in failed: check the token, or the name and the password", headers)
            for limiter, key in attempts:
                limiter.refund(key)
            if address not in self._known_addresses:
                self._known_addresses.append(address)
        return person

    def _report(self, request: Request, event: LogEvent, text: str) -> None:
        TELEMETRY.report(logging.WARNING, event, text, address=address_of(request))

    def begin_session(self, request: Request, person: Person) -> str:
        """End the session of this browser, and begin another. Return the text for its cookie."""
        before = self.sessions.open(request.cookies.get(cookie_of(request)["key"], ""))
        if before is not None:
            self.sessions.end(before)
        address = address_of(request)
        TELEMETRY.report(
            logging.INFO, LogEvent.WEB_SIGNED_IN, "signed in", viewer=person.name, role=person.role, address=address
        )
        return self.sessions.seal(self.sessions.begin(person))


class AccessMiddleware:
    """Admits viewers to the pages, checks their forms, and extends their sessions."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)  # The router refuses it.
            return
        request = Request(scope, receive)
        viewer = await self._access.identify(request)
        if viewer is None:
            await _ask_for_sign_in(request)(scope, receive, send)
            return
        if request.method == "POST":
            await _check_form(request, viewer)
        elif request.method not in ("GET", "HEAD"):
            raise HTTPException(405, headers={"Allow": "GET, HEAD, POST"})
        scope[VIEWER], scope["auth"] = viewer, AuthCredentials([viewer.role])

        async def send_with_cookie(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._extend_session(request, MutableHeaders(scope=message))
            await send(message)

        await self._app(scope, receive, send_with_cookie)

    def _extend_session(self, request: Request, headers: MutableHeaders) -> None:
        session: Session | None = request.scope.get(SESSION)
        if session is not None and not is_live(request) and self._access.sessions.needs_new_cookie(session):
            response = Response()
            response.set_cookie(value=self._access.sessions.seal(session), **cookie_of(request))
            headers.append("set-cookie", response.headers["set-cookie"])


def _ask_for_sign_in(request: Request) -> Response:
    by_person = request.method == "GET" and "text/html" in request.headers.get("accept", "") and not is_live(request)
    if not by_person:
        raise HTTPException(401, "not signed in", {"WWW-Authenticate": "Bearer"})
    query = request.scope["query_string"].decode("ascii", "replace")
    path = quote(path_of(request)) + (f"?{query}" if query else "")
    onward = f"?next={quote(path, safe='/')}" if local_path(path) != "/" else ""
    return RedirectResponse(f"{request.scope[ROOT]}/login{onward}", status_code=303)


# --- the request ------------------------------------------------------------------------------------------------------


def is_live(request: Request) -> bool:
    """Return whether the script of the page sent the request, not a person."""
    asks_for_stream = request.headers.get("accept") == "text/event-stream"
    return _LIVE_HEADER in request.headers or path_of(request) == "/live" or asks_for_stream


def address_of(request: Request) -> str:
    """Return the address of the client."""
    return request.client.host[:100] if request.client is not None else "local"


def _bearer_of(request: Request) -> str | None:
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else None


def local_path(text: str) -> str:
    """Return the path if it is below the dashboard, otherwise the first page."""
    safe = re.fullmatch(r"/(?![/\\])[\x21-\x5b\x5d-\x7e]*", text) is not None
    return text if safe and len(text) <= 2_000 and not text.startswith(("/login", "/logout")) else "/"


def cookie_of(request: Request) -> dict[str, Any]:
    """Return the name and the attributes of the session cookie, for `set_cookie`.

    The prefix of the name makes the browser check the attributes. On localhost the name contains the port, because
    ports share their cookies there. Elsewhere the cookie needs https, which a proxy may provide.
    """
    root, url = request.scope[ROOT], request.base_url
    forwarded = "x-forwarded-proto" in request.headers or "forwarded" in request.headers
    is_secure = url.scheme == "https" or forwarded or url.hostname not in ("localhost", "127.0.0.1", "::1")
    prefix = "__Secure-" if root else "__Host-"
    name = f"{prefix}pgoutbox" if is_secure else f"pgoutbox-{url.port or 80}"
    return {"key": name, "path": root or "/", "secure": is_secure, "httponly": True, "samesite": "strict"}


async def _check_form(request: Request, viewer: Viewer) -> None:
    """Refuse a POST of a browser that none of our forms sent. Scripts with a token have no form."""
    form = await read_form(request)
    check_origin(request, required=bool(viewer.csrf_token))
    given = request.headers.get("x-csrf-token") or form.get("csrf_token", "")
    if viewer.csrf_token and not secrets.compare_digest(given.encode(errors="replace"), viewer.csrf_token.encode()):
        raise HTTPException(403, "this form is from another session: reload the page and try again")


def check_origin(request: Request, *, required: bool) -> None:
    """Refuse a POST that does not come from our own pages.

    With `Referrer-Policy: no-referrer`, browsers send `Origin: null` for our own forms too, so `Sec-Fetch-Site` decides
    if present. It is missing only on plain http to another machine, where browsers do not keep our cookie.
    """
    site, origin = request.headers.get("sec-fetch-site"), request.headers.get("origin")
    named = origin is not None and origin != "null"
    if site is not None and site != "same-origin":
        raise HTTPException(403, "this request comes from another site")
    if named and urlsplit(origin or "").netloc.lower() != request.headers.get("host", "").strip().lower():
        raise HTTPException(403, "this request comes from another site")
    if required and site is None and not named:
        raise HTTPException(403, "this request does not show that it comes from the dashboard: use https, or localhost")
