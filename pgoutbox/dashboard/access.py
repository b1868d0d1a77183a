"""Authentication, authorisation and request checks of the dashboard.

`protect` wraps all pages. It checks the host name, the method, the size of the body, the viewer, and for each POST
that one of our forms sent it. Every response has the security headers, refusals and errors too, and reveals no more
than it must.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import logging
import re
import secrets
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import TYPE_CHECKING, Final, NamedTuple, Self, TypeAlias
from urllib.parse import parse_qsl, quote, urlsplit

from starlette.datastructures import ImmutableMultiDict, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response

from pgoutbox.dashboard.credentials import Credentials, Person, RateLimiter, Role, Session, Sessions, people_of, sign
from pgoutbox.dashboard.rendering import render
from pgoutbox.dashboard.types import ROOT, VIEWER, Viewer
from pgoutbox.errors import ConfigurationError
from pgoutbox.observability.events import LogEvent, Telemetry

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from pgoutbox.settings import Settings

__all__ = ["FORM", "LOOPBACK_NAMES", "Access", "Authenticate", "Role", "Viewer", "operators_only", "protect"]

FORM: Final = "pgoutbox.form"
MAX_BODY_BYTES: Final = 65_536
LOOPBACK_NAMES: Final = frozenset({"localhost", "127.0.0.1", "[::1]"})

_MAX_FIELDS: Final = 5_000
_LIVE_HEADER: Final = "x-pgoutbox-live"
_METHODS: Final = ("GET", "HEAD", "POST")
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

_logger = logging.getLogger("pgoutbox.dashboard")


Endpoint: TypeAlias = Callable[[Request], Awaitable[Response]]
Authenticate: TypeAlias = Callable[[Request], "Viewer | Awaitable[Viewer | None] | None"]


def operators_only(endpoint: Endpoint) -> Endpoint:
    """Allow only operators on this page; others get 403."""

    @functools.wraps(endpoint)
    async def checked(request: Request) -> Response:
        if request.scope[VIEWER].role != "operator":
            raise HTTPException(403, "this page needs the role operator")
        return await endpoint(request)

    return checked


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
        everybody: Role | None = None,
        hosts: Collection[str] = (),
    ) -> None:
        given = settings.web.secret
        self.secret: Final = given.get_secret_value().encode() if given is not None else secrets.token_bytes(32)
        self.credentials: Final = Credentials(tuple(people))
        self.sessions: Final = Sessions(
            self.credentials,
            secret=self.secret,
            idle_seconds=settings.web.session_idle_seconds,
            max_seconds=settings.web.session_max_seconds,
        )
        self.authenticate: Final = authenticate
        self.everybody: Final = everybody
        self.has_sign_in: Final = bool(people)
        named = [name.strip().lower() for name in (settings.web.hosts or "").split(",") if name.strip()]
        self.hosts: Final = frozenset(hosts) | frozenset(named)
        # Wrong tries per address: five at once, then one per 12 s. For all addresses together: one per second.
        self.address_limit: Final = RateLimiter(burst=5, interval_seconds=12)
        self.common_limit: Final = RateLimiter(burst=60, interval_seconds=1, capacity=1)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}>"

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

        Return `Viewer(name, role)`, or None to answer with 401. With several processes, set `web.secret`, so that each
        accepts the forms of the others.
        """
        return cls(settings, authenticate=authenticate)

    @classmethod
    def open_to_all(cls, role: Role, settings: Settings, *, hosts: Collection[str] = LOOPBACK_NAMES) -> Self:
        """Require no sign-in: every request has this role. For your own machine only."""
        return cls(settings, everybody=role, hosts=hosts)


def protect(app: ASGIApp, access: Access) -> ASGIApp:
    """Wrap the pages in the checks. Needs `scope["pgoutbox.root"]`."""
    return _AccessMiddleware(app, access)


class _RefusalError(Exception):
    """The status, text and headers of a refused request."""

    def __init__(self, status: int, text: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(text)
        self.status = status
        self.text = text
        self.headers = dict(headers or {})


class _Identity(NamedTuple):
    """An authenticated viewer; with a session if a browser signed in here."""

    viewer: Viewer
    session: Session | None
    by_browser: bool


_HEADINGS: Final = {
    400: "Bad request",
    401: "Not signed in",
    403: "Not allowed",
    404: "Not found",
    405: "Not allowed",
    413: "Too large",
    415: "Not a form",
    429: "Too many attempts",
    500: "Something went wrong",
}


class _AccessMiddleware:
    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access
        self._telemetry = Telemetry(_logger)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive)
        answer = _Answer(send, keeps_static=_is_static(request))
        try:
            try:
                await self._serve(request, answer)
            except _RefusalError as refusal:
                await _refuse(request, refusal)(scope, receive, answer.send)
        except ClientDisconnect:
            return
        except Exception as error:  # noqa: BLE001 - the answer must not reveal the error
            # Log neither the text nor the traceback: errors of the driver quote values of rows.
            self._telemetry.report(
                logging.ERROR,
                LogEvent.WEB_PAGE_FAILED,
                "a page failed",
                path=_path_of(request),
                error_type=type(error).__name__,
                error_place=_place_of(error),
            )
            if answer.begun:
                # The server detects the incomplete answer, and closes the connection.
                return
            failed = _RefusalError(500, "The dashboard failed. See its log for the error.")
            await _refuse(request, failed)(scope, receive, answer.send)

    async def _serve(self, request: Request, answer: _Answer) -> None:
        scope, path = request.scope, _path_of(request)
        if path == "/healthz":
            await PlainTextResponse("ok\n")(scope, request.receive, answer.send)
            return
        self._check_host(request)
        if request.method not in _METHODS:
            raise _RefusalError(405, f"Method {request.method} is not supported.", {"Allow": ", ".join(_METHODS)})
        if _declared_length(request) > MAX_BODY_BYTES:
            raise _too_large()
        if _is_static(request):
            await self._app(scope, request.receive, answer.send)
            return
        if path == "/login" and self._access.has_sign_in:
            response = await self._sign_in(request) if request.method == "POST" else self._sign_in_page(request)
            await response(scope, request.receive, answer.send)
            return
        await self._serve_viewer(request, answer, await self._admit(request))

    async def _serve_viewer(self, request: Request, answer: _Answer, passed: _Identity) -> None:
        scope, receive = request.scope, request.receive
        if request.method == "POST":
            body = await _read_body(request)
            form = _parse_form(request, body)
            _check_origin(request, required=passed.by_browser)
            if passed.by_browser:
                _check_csrf(request, form, passed.viewer.csrf_token)
            scope[FORM] = form
            receive = _replay(body, receive)
        if _path_of(request) == "/logout" and passed.session is not None:
            if request.method != "POST":
                raise _RefusalError(405, "Use POST to sign out.", {"Allow": "POST"})
            await self._sign_out(request, passed.session)(scope, receive, answer.send)
            return
        if passed.session is not None and not is_live(request):
            extended = self._access.sessions.extend(passed.session)
            if extended is not None:
                answer.cookie = _Cookie.of(request).set(self._access.sessions.seal(extended))
        scope[VIEWER] = passed.viewer
        await self._app(scope, receive, answer.send)

    def _check_host(self, request: Request) -> None:
        hosts = self._access.hosts
        if hosts and _host(request)[0] not in hosts:
            raise _RefusalError(400, "Unknown host name. Add it to PGOUTBOX_WEB_HOSTS.")

    # --- authentication -----------------------------------------------------------------------------------------------

    async def _admit(self, request: Request) -> _Identity:
        access, origin = self._access, f"web {_address(request)}"
        if access.authenticate is not None:
            answered = access.authenticate(request)
            viewer = await answered if inspect.isawaitable(answered) else answered
            if viewer is None:
                raise _RefusalError(401, "Sign in to the application first.")
            return self._pass_without_session(viewer, origin, by_browser=_bearer(request) is None)
        if access.everybody is not None:
            return self._pass_without_session(Viewer("anyone", access.everybody), origin, by_browser=True)
        token = _bearer(request)
        if token is not None:
            return _Identity(self._viewer_by_token(request, token, origin), None, by_browser=False)
        session = access.sessions.open(request.cookies.get(_Cookie.of(request).name, ""))
        if session is None:
            raise _not_signed_in(request)
        person = session.person
        viewer = Viewer(person.name, person.role, access.sessions.csrf_token(session), origin, can_sign_out=True)
        return _Identity(viewer, session, by_browser=True)

    def _pass_without_session(self, viewer: Viewer, origin: str, *, by_browser: bool) -> _Identity:
        token = sign(self._access.secret, "csrf", viewer.role, viewer.name)
        known = dataclasses.replace(viewer, csrf_token=token, origin=viewer.origin or origin, can_sign_out=False)
        return _Identity(known, None, by_browser)

    def _viewer_by_token(self, request: Request, token: str, origin: str) -> Viewer:
        # A valid token is never rate-limited: others may share its address, and it is too long to be guessed.
        person = self._access.credentials.by_token(token)
        if person is None:
            self._refuse_above_limit(request, self._access.address_limit.take(_address(request)))
            self._report_refused(request)
            raise _RefusalError(401, "Unknown token.", {"WWW-Authenticate": 'Bearer error="invalid_token"'})
        return Viewer(person.name, person.role, origin=origin)

    def _refuse_above_limit(self, request: Request, wait_seconds: float) -> None:
        if wait_seconds > 0:
            self._telemetry.report(
                logging.WARNING, LogEvent.WEB_SIGN_IN_BRAKED, "too many sign-in attempts", address=_address(request)
            )
            raise _RefusalError(
                429,
                "Too many sign-in attempts. Wait a moment, then try again.",
                {"Retry-After": str(int(wait_seconds) + 1)},
            )

    def _report_refused(self, request: Request) -> None:
        # Do not log the typed name: it may be a password.
        self._telemetry.report(
            logging.WARNING, LogEvent.WEB_SIGN_IN_REFUSED, "sign-in failed", address=_address(request)
        )

    # --- signing in and out -------------------------------------------------------------------------------------------

    def _sign_in_page(
        self,
        request: Request,
        *,
        onward: str | None = None,
        error: str | None = None,
        status: int = 200,
        headers: Mapping[str, str] | None = None,
    ) -> Response:
        target = _local_path(request.query_params.get("next", "") if onward is None else onward)
        context = {
            "action": f"{request.scope[ROOT]}/login",
            "onward": target,
            "onward_link": f"{request.scope[ROOT]}{target}",
            # A browser does not send its session cookie if it follows a link from another site.
            "is_cross_site": request.headers.get("sec-fetch-site") == "cross-site",
            "asks_name": self._access.credentials.has_passwords,
            "error": error,
        }
        return render(request, "login.html", context, status=status, headers=headers)

    async def _sign_in(self, request: Request) -> Response:
        access, address = self._access, _address(request)
        _check_origin(request, required=True)
        form = _parse_form(request, await _read_body(request))
        onward = form.get("next", "")
        person = access.credentials.by_token(form.get("secret", ""))
        if person is None:
            try:
                self._refuse_above_limit(request, access.address_limit.take(address))
                self._refuse_above_limit(request, access.common_limit.take("all"))
            except _RefusalError as refusal:
                return self._sign_in_page(
                    request, onward=onward, error=refusal.text, status=refusal.status, headers=refusal.headers
                )
            person = await access.credentials.identify(form.get("name", "").strip(), form.get("secret", ""))
            if person is None:
                self._report_refused(request)
                error = "Sign-in failed. Check the token, or the name and the password."
                return self._sign_in_page(request, onward=onward, error=error, status=401)
            access.address_limit.give_back(address)
            access.common_limit.give_back("all")
        cookie = _Cookie.of(request)
        before = access.sessions.open(request.cookies.get(cookie.name, ""))
        if before is not None:
            access.sessions.end(before)
        self._telemetry.report(
            logging.INFO, LogEvent.WEB_SIGNED_IN, "signed in", viewer=person.name, role=person.role, address=address
        )
        response = RedirectResponse(f"{request.scope[ROOT]}{_local_path(onward)}", status_code=303)
        response.headers["set-cookie"] = cookie.set(access.sessions.seal(access.sessions.begin(person)))
        return response

    def _sign_out(self, request: Request, session: Session) -> Response:
        self._access.sessions.end(session)
        response = RedirectResponse(f"{request.scope[ROOT]}/login", status_code=303)
        response.headers["set-cookie"] = _Cookie.of(request).clear()
        return response


# --- the request ------------------------------------------------------------------------------------------------------


def _path_of(request: Request) -> str:
    path: str = request.scope["path"]
    return path.removeprefix(request.scope[ROOT])


def _is_static(request: Request) -> bool:
    return _path_of(request).startswith("/static/") and request.method in ("GET", "HEAD")


def is_live(request: Request) -> bool:
    """Return whether the script of the page sent the request, not a person."""
    return _LIVE_HEADER in request.headers or _path_of(request) == "/live"


def _address(request: Request) -> str:
    return request.client.host[:100] if request.client is not None else "local"


def _host(request: Request) -> tuple[str, str]:
    """Return the name and the port of the Host header; the port may be empty."""
    text = request.headers.get("host", "").strip().lower()
    match = re.fullmatch(r"(.*?)\.?(?::([0-9]{1,5}))?", text)
    return (match[1], match[2] or "") if match is not None else (text, "")


def _is_secure(request: Request) -> bool:
    """Return whether the browser uses https, or may use it through a proxy."""
    forwarded = "x-forwarded-proto" in request.headers or "forwarded" in request.headers
    return request.scope["scheme"] == "https" or forwarded or _host(request)[0] not in LOOPBACK_NAMES


def _bearer(request: Request) -> str | None:
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else None


def _local_path(text: str) -> str:
    """Return the path if it is below the dashboard, otherwise the first page."""
    safe = re.fullmatch(r"/(?![/\\])[\x21-\x5b\x5d-\x7e]*", text) is not None
    return text if safe and len(text) <= 2_000 and not text.startswith(("/login", "/logout")) else "/"


def _not_signed_in(request: Request) -> _RefusalError:
    by_person = request.method == "GET" and "text/html" in request.headers.get("accept", "") and not is_live(request)
    if not by_person:
        return _RefusalError(401, "Not signed in.", {"WWW-Authenticate": "Bearer"})
    query = request.scope["query_string"].decode("ascii", "replace")
    path = quote(_path_of(request)) + (f"?{query}" if query else "")
    onward = f"?next={quote(path, safe='/')}" if _local_path(path) != "/" else ""
    return _RefusalError(303, "", {"Location": f"{request.scope[ROOT]}/login{onward}"})


def _check_origin(request: Request, *, required: bool) -> None:
    """Refuse a POST that does not come from our own pages.

    With `Referrer-Policy: no-referrer`, browsers send `Origin: null` for our own forms too, so `Sec-Fetch-Site` decides
    if present. It is missing only on plain http to another machine, where browsers do not keep our cookie.
    """
    site, origin = request.headers.get("sec-fetch-site"), request.headers.get("origin")
    named = origin is not None and origin != "null"
    if site is not None and site != "same-origin":
        raise _RefusalError(403, "This request comes from another site.")
    if named and urlsplit(origin or "").netloc.lower() != request.headers.get("host", "").strip().lower():
        raise _RefusalError(403, "This request comes from another site.")
    if required and site is None and not named:
        raise _RefusalError(
            403,
            "This request does not show that it comes from the dashboard. Use https, or localhost.",
        )


def _check_csrf(request: Request, form: ImmutableMultiDict[str, str], expected: str) -> None:
    given = request.headers.get("x-csrf-token") or form.get("csrf_token", "")
    if not secrets.compare_digest(given.encode(errors="replace"), expected.encode()):
        raise _RefusalError(403, "This form is from another session. Reload the page and try again.")


# --- bodies -----------------------------------------------------------------------------------------------------------


def _too_large() -> _RefusalError:
    return _RefusalError(413, f"The request is larger than {MAX_BODY_BYTES:,} bytes.", {"Connection": "close"})


def _declared_length(request: Request) -> int:
    text = request.headers.get("content-length", "")
    return int(text) if text.isascii() and text.isdigit() else 0


async def _read_body(request: Request) -> bytes:
    """Read the whole body, up to the limit."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise _too_large()
    return bytes(body)


def _parse_form(request: Request, body: bytes) -> ImmutableMultiDict[str, str]:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if body and kind != "application/x-www-form-urlencoded":
        raise _RefusalError(415, "Unsupported content type. Send application/x-www-form-urlencoded.")
    try:
        pairs = parse_qsl(body.decode("ascii"), keep_blank_values=True, max_num_fields=_MAX_FIELDS, errors="strict")
    except ValueError:
        raise _RefusalError(400, "Invalid form.") from None
    return ImmutableMultiDict(pairs)


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a receive function that repeats the body, then reads from the connection."""
    waiting = [body]

    async def replay() -> Message:
        if waiting:
            return {"type": "http.request", "body": waiting.pop(), "more_body": False}
        return await receive()

    return replay


# --- answers ----------------------------------------------------------------------------------------------------------


class _Answer:
    """Sends the response with the security headers, and a cookie if there is one."""

    def __init__(self, send: Send, *, keeps_static: bool) -> None:
        self._send = send
        self._keeps_static = keeps_static
        self.begun = False
        self.cookie: str | None = None

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.begun = True
            headers = MutableHeaders(raw=list(message.get("headers", ())))
            for name, value in SECURITY_HEADERS.items():
                headers[name] = value
            if not (self._keeps_static and message["status"] in (200, 206, 304)):
                headers["cache-control"] = "no-store"
            if self.cookie is not None:
                headers.append("set-cookie", self.cookie)
            message = {**message, "headers": headers.raw}
        await self._send(message)


class _Cookie(NamedTuple):
    """The cookie of a session. The prefix of its name makes the browser check its attributes.

    Ports of localhost share their cookies, so the name contains the port.
    """

    name: str
    attributes: str

    @classmethod
    def of(cls, request: Request) -> Self:
        root = request.scope[ROOT]
        if not _is_secure(request):
            return cls(f"pgoutbox-{_host(request)[1] or 80}", f"Path={root or '/'}; HttpOnly; SameSite=Strict")
        prefix = "__Secure-" if root else "__Host-"
        return cls(f"{prefix}pgoutbox", f"Path={root or '/'}; HttpOnly; SameSite=Strict; Secure")

    def set(self, value: str) -> str:
        return f"{self.name}={value}; {self.attributes}"

    def clear(self) -> str:
        return f'{self.name}=""; Max-Age=0; {self.attributes}'


def _refuse(request: Request, refusal: _RefusalError) -> Response:
    headers = dict(refusal.headers)
    if request.method not in ("GET", "HEAD"):
        # The body may be unread.
        headers["Connection"] = "close"
    if refusal.status == 303:
        return Response(status_code=303, headers=headers)
    if "text/html" in request.headers.get("accept", ""):
        context = {"status": refusal.status, "heading": _HEADINGS[refusal.status], "text": refusal.text}
        return render(request, "refusal.html", context, status=refusal.status, headers=headers)
    return PlainTextResponse(f"{refusal.text}\n", status_code=refusal.status, headers=headers)


def _place_of(error: BaseException) -> str:
    trace, place = error.__traceback__, ""
    while trace is not None:
        place = f"{trace.tb_frame.f_globals.get('__name__', '?')}:{trace.tb_lineno}"
        trace = trace.tb_next
    return place
