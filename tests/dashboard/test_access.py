"""Tests access to the dashboard by HTTP and by raw sockets: unauthorized people see no page and trigger no action."""

from __future__ import annotations

import logging
import re
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final, Protocol

import httpx
import pytest

from pgoutbox.dashboard.access import LOOPBACK_NAMES, Access, Authenticate
from pgoutbox.dashboard.credentials import VIEWER, RateLimiter, Viewer
from pgoutbox.dashboard.server import _RequestTimeoutProtocol
from pgoutbox.errors import ConfigurationError
from pgoutbox.settings import load_settings
from tests.support.waiting import PROCESS_PATIENCE_SECONDS, wait_until
from tests.support.web_server import (
    CANARY,
    OPERATOR_TOKEN,
    PAGE,
    VIEWER_TOKEN,
    HostServers,
    Pages,
    RawConnection,
    serving,
    web_settings,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from starlette.requests import Request
    from starlette.types import Receive, Scope, Send

    from pgoutbox.settings import Settings

pytestmark = pytest.mark.slow

OURS: Final = {"Sec-Fetch-Site": "same-origin"}
AS_BROWSER: Final = {"Accept": "text/html,application/xhtml+xml"}
PASSWORD: Final = "correct horse battery"
PASSWORD_HASH: Final = (
    "$argon2id$v=19$m=19456,t=2,p=1$WFONIh87GnehH6UQIG/JIQ$FKoBRIeR9wy6rx2xjwHB/z4tOc9ZqIVRc8PGXaxp9WI"
)
POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; form-action 'self'; "
    "frame-ancestors 'none'; base-uri 'none'"
)


class Site:
    """A served dashboard and its clients."""

    def __init__(self, url: str, access: Access, pages: Pages, stack: ExitStack) -> None:
        self.url = url
        self.access = access
        self.pages = pages
        self._stack = stack

    def client(self, headers: dict[str, str] | None = None, cookies: dict[str, str] | None = None) -> httpx.Client:
        """Return a browser without a session, with these headers and cookies."""
        # These sites have no TLS, so no certificate is loaded.
        made = httpx.Client(base_url=self.url, timeout=PROCESS_PATIENCE_SECONDS, headers=headers, verify=False)
        for name, value in (cookies or {}).items():
            made.cookies.set(name, value, domain="127.0.0.1", path="/")
        return self._stack.enter_context(made)

    def sign_in(self, token: str = OPERATOR_TOKEN) -> httpx.Client:
        """Return a browser with a session."""
        client = self.client()
        assert post_sign_in(client, token).status_code == 303
        return client

    def raw(self) -> RawConnection:
        """Open a raw connection."""
        return self._stack.enter_context(RawConnection(self.url))


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


@pytest.fixture(scope="module")
def hosts() -> Iterator[HostServers]:
    with ExitStack() as opened:
        yield HostServers(opened)


class OpenSite(Protocol):
    """Serve an application of its own behind `access`. A server of its own has these settings."""

    def __call__(self, access: Access, settings: Settings | None = None, *, root: str = "") -> Site: ...


@pytest.fixture
def open_site(stack: ExitStack, hosts: HostServers) -> OpenSite:
    def open_one(access: Access, settings: Settings | None = None, *, root: str = "") -> Site:
        pages = Pages()
        app = pages.app(access, root=root)
        url = stack.enter_context(hosts.serving(app) if settings is None else serving(app, settings))
        # Closed in reverse order: the clients first, and the streams with them.
        return Site(url, access, pages, stack)

    return open_one


@pytest.fixture
def site(open_site: OpenSite) -> Site:
    return open_site(Access.from_settings(web_settings()))


def post_sign_in(client: httpx.Client, token: str, **fields: str) -> httpx.Response:
    return client.post("/login", data={"secret": token, **fields}, headers=OURS)


def csrf_of(client: httpx.Client) -> str:
    return str(client.get("/").json()["csrf"])


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def logged(caplog: pytest.LogCaptureFixture) -> str:
    """Return the whole log, with the fields that a formatter would show."""
    return caplog.text + str([record.__dict__ for record in caplog.records])


def events(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.__dict__["event"] for record in caplog.records if "event" in record.__dict__]


# --- authentication ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/", "/messages", "/live", "/act", "/nowhere", "/static/../messages", "//messages"])
@pytest.mark.parametrize(
    "headers",
    [
        {},
        bearer("x" * 40),
        {"Authorization": "Bearer"},
        bearer(OPERATOR_TOKEN[:-1]),
        {"Authorization": OPERATOR_TOKEN},
        {"Authorization": f"Basic {OPERATOR_TOKEN}"},
        {"Cookie": "pgoutbox=x; __Host-pgoutbox=x"},
        {"X-Forwarded-User": "ada"},
    ],
    ids=str,
)
def test_unknown_users_see_nothing(site: Site, path: str, headers: dict[str, str]) -> None:
    answer = site.client().get(path, headers=headers)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"].startswith("Bearer")
    assert PAGE not in answer.text


def test_a_browser_is_redirected_to_the_sign_in_and_back(site: Site) -> None:
    client = site.client(headers=AS_BROWSER)
    led = client.get("/messages?topic=a%26b&page=2")
    assert (led.status_code, led.text) == (303, "")
    page = client.get(led.headers["location"])
    assert page.status_code == 200
    assert 'name="secret"' in page.text
    onward = re.search(r'name="next" value="([^"]*)"', page.text)
    assert onward is not None
    back = post_sign_in(client, OPERATOR_TOKEN, next=onward[1].replace("&amp;", "&"))
    assert (back.status_code, back.headers["location"]) == (303, "/messages?topic=a%26b&page=2")
    assert client.get("/messages").json()["name"] == "ada"


def test_background_requests_are_never_redirected_to_the_sign_in(site: Site) -> None:
    client = site.client(headers=AS_BROWSER)
    assert client.get("/", headers={"X-Pgoutbox-Live": "1"}).status_code == 401
    assert client.get("/live").status_code == 401
    assert client.post("/act", headers=OURS).status_code == 401


@pytest.mark.parametrize(
    "onward",
    [
        "https://evil.example/", "//evil.example/", "/\\evil.example/", "/\t/evil.example", "javascript:alert(1)",
        "/\r\nSet-Cookie: a=b", "evil.example", "", "/login", "/logout", "/" + "a" * 3_000, "/\u2028",
        "\\\\evil.example",
    ],
)  # fmt: skip
def test_a_sign_in_redirects_only_within_the_dashboard(site: Site, onward: str) -> None:
    answer = post_sign_in(site.client(), OPERATOR_TOKEN, next=onward)
    assert (answer.status_code, answer.headers["location"]) == (303, "/")
    assert len(answer.headers.get_list("set-cookie")) == 1


def test_each_token_has_its_role(site: Site) -> None:
    for token, name, role in ((OPERATOR_TOKEN, "ada", "operator"), (VIEWER_TOKEN, "vera", "viewer")):
        for told in (site.sign_in(token).get("/").json(), site.client(headers=bearer(token)).get("/").json()):
            assert (told["name"], told["role"], told["origin"]) == (name, role, "web 127.0.0.1")


def test_the_name_of_the_scheme_is_case_insensitive(site: Site) -> None:
    assert site.client(headers={"Authorization": f"bEARER {OPERATOR_TOKEN}"}).get("/").status_code == 200


def test_a_viewer_cannot_act(site: Site) -> None:
    client = site.sign_in(VIEWER_TOKEN)
    assert client.post("/act", data={"csrf_token": csrf_of(client)}, headers=OURS).status_code == 403
    assert site.client().post("/act", headers=bearer(VIEWER_TOKEN)).status_code == 403
    assert site.pages.forms == []


def test_an_operator_can_act_by_form_by_header_and_by_script(site: Site) -> None:
    client = site.sign_in()
    token = csrf_of(client)
    by_form = client.post("/act", data={"csrf_token": token, "reason": "a & ü"}, headers=OURS)
    by_header = client.post("/act", headers={**OURS, "X-CSRF-Token": token})
    by_script = site.client().post("/act", data={"reason": "script"}, headers=bearer(OPERATOR_TOKEN))
    assert [answer.status_code for answer in (by_form, by_header, by_script)] == [200, 200, 200]
    assert site.pages.forms == [{"csrf_token": token, "reason": "a & ü"}, {}, {"reason": "script"}]
    assert by_script.text == "reason=script"


def test_a_password_signs_its_user_in(open_site: OpenSite) -> None:
    settings = web_settings(web_viewer_tokens=f"vera:{PASSWORD_HASH}")
    site = open_site(Access.from_settings(settings))
    client = site.client()
    assert 'name="name"' in client.get("/login").text
    assert post_sign_in(client, PASSWORD, name="ada").status_code == 401
    refused = post_sign_in(client, f"{PASSWORD}!", name="vera")
    assert refused.status_code == 401
    assert "Sign-in failed: check the token, or the name and the password." in refused.text
    assert client.get("/").status_code == 401
    assert post_sign_in(client, PASSWORD, name="vera").status_code == 303
    assert client.get("/").json()["role"] == "viewer"
    assert site.client(headers=bearer(PASSWORD)).get("/").status_code == 401
    assert site.client(headers=bearer(PASSWORD_HASH)).get("/").status_code == 401


# --- sessions ---------------------------------------------------------------------------------------------------------


def test_on_localhost_the_cookie_is_bound_to_the_port_and_safe_from_scripts(site: Site) -> None:
    cookie = post_sign_in(site.client(), OPERATOR_TOKEN).headers["set-cookie"]
    name, _, attributes = cookie.partition("=")
    assert name == f"pgoutbox-{site.url.rpartition(':')[2]}"
    assert set(attributes.split("; ")[1:]) == {"Path=/", "HttpOnly", "SameSite=strict"}
    assert OPERATOR_TOKEN not in cookie


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "outbox.example.org"},
        {"Host": "127.0.0.1", "X-Forwarded-Proto": "https"},
        {"Host": "127.0.0.1", "Forwarded": "proto=https"},
        {"Host": "127.0.0.1.example.org"},
        {"Host": "192.0.2.1:8400"},
    ],
    ids=str,
)
def test_elsewhere_the_cookie_requires_https_and_this_host(site: Site, headers: dict[str, str]) -> None:
    answer = site.client().post("/login", data={"secret": OPERATOR_TOKEN}, headers={**OURS, **headers})
    name, _, attributes = answer.headers["set-cookie"].partition("=")
    assert name == "__Host-pgoutbox"
    assert set(attributes.split("; ")[1:]) == {"Path=/", "HttpOnly", "SameSite=strict", "Secure"}


def test_a_mounted_dashboard_keeps_its_cookie_and_its_paths_below_its_prefix(open_site: OpenSite) -> None:
    site = open_site(Access.from_settings(web_settings()), root="/ops/outbox")
    client = site.client(headers=AS_BROWSER)
    assert client.get("/ops/outbox/failed").headers["location"] == "/ops/outbox/login?next=/failed"
    headers = {**OURS, "Host": "outbox.example.org"}
    secure = client.post("/ops/outbox/login", data={"secret": OPERATOR_TOKEN, "next": "/failed"}, headers=headers)
    assert secure.headers["location"] == "/ops/outbox/failed"
    assert secure.headers["set-cookie"].startswith("__Secure-pgoutbox=")
    assert "; Path=/ops/outbox;" in secure.headers["set-cookie"]
    local = client.post("/ops/outbox/login", data={"secret": OPERATOR_TOKEN}, headers=OURS)
    assert "; Path=/ops/outbox;" in local.headers["set-cookie"]
    assert client.get("/ops/outbox/failed").json()["name"] == "ada"
    assert client.get("/ops/outbox/healthz").text == "ok\n"
    csrf = {"csrf_token": client.get("/ops/outbox/").json()["csrf"]}
    assert client.post("/ops/outbox/logout", data=csrf, headers=OURS).headers["location"] == "/ops/outbox/login"


def test_each_sign_in_starts_a_new_session_and_ends_the_previous_one(site: Site) -> None:
    client = site.client(cookies={f"pgoutbox-{site.url.rpartition(':')[2]}": "chosen-by-somebody"})
    assert post_sign_in(client, OPERATOR_TOKEN).status_code == 303
    first = dict(client.cookies)
    token = csrf_of(client)
    assert post_sign_in(client, OPERATOR_TOKEN).status_code == 303
    assert dict(client.cookies) != first
    assert csrf_of(client) != token
    assert site.client(cookies=first).get("/").status_code == 401


def test_signing_out_ends_every_copy_of_the_cookie(site: Site) -> None:
    client = site.sign_in()
    copy = site.client(cookies=dict(client.cookies))
    out = client.post("/logout", data={"csrf_token": csrf_of(client)}, headers=OURS)
    assert (out.status_code, out.headers["location"]) == (303, "/login")
    assert "Max-Age=0" in out.headers["set-cookie"]
    assert dict(client.cookies) == {}
    assert [client.get("/").status_code, copy.get("/").status_code] == [401, 401]


def test_a_link_or_another_site_cannot_sign_a_user_out(site: Site) -> None:
    client = site.sign_in()
    assert client.get("/logout").status_code == 405
    assert client.post("/logout", headers=OURS).status_code == 403
    token = csrf_of(client)
    assert (
        client.post("/logout", data={"csrf_token": token}, headers={"Sec-Fetch-Site": "cross-site"}).status_code == 403
    )
    assert client.get("/").status_code == 200


def sealed(site: Site, patch: pytest.MonkeyPatch, *, begun: float, seen: float) -> dict[str, str]:
    """Return the cookie of a session that began and was last used this many seconds ago."""
    person = site.access.credentials.by_name("ada")
    assert person is not None
    now = time.time()
    session = site.access.sessions.begin(person)._replace(begun_at=now - begun)
    with patch.context() as past:
        past.setattr(time, "time", lambda: now - seen)
        return {f"pgoutbox-{site.url.rpartition(':')[2]}": site.access.sessions.seal(session)}


def test_a_session_ends_after_its_idle_timeout_and_its_maximum_lifetime(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    def status(begun: float, seen: float) -> int:
        return site.client(cookies=sealed(site, monkeypatch, begun=begun, seen=seen)).get("/").status_code

    assert [status(1_700, 1_700), status(1_900, 1_900), status(43_000, 0), status(43_300, 0)] == [200, 401, 200, 401]


def test_use_extends_a_session_but_automatic_refreshes_do_not(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    client = site.client(cookies=sealed(site, monkeypatch, begun=1_000, seen=1_000))
    assert "set-cookie" not in client.get("/", headers={"X-Pgoutbox-Live": "1"}).headers
    with client.stream("GET", "/live") as stream:
        assert "set-cookie" not in stream.headers
    site.pages.next_event.set()
    answer = client.get("/")
    assert "HttpOnly" in answer.headers["set-cookie"]
    assert "set-cookie" not in client.get("/").headers


# --- forged requests --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Sec-Fetch-Site": "none"},
        {"Origin": "null"},
        {"Origin": "https://evil.example"},
        {"Origin": "http://127.0.0.1:1"},
        {"Origin": "http://127.0.0.1"},
        {"Origin": "https://evil.example", "Sec-Fetch-Site": "same-origin"},
    ],
    ids=str,
)
def test_requests_from_other_sites_are_refused(site: Site, headers: dict[str, str]) -> None:
    client = site.sign_in()
    data = {"csrf_token": csrf_of(client)}
    answers = [
        client.post("/act", data=data, headers=headers),
        client.post("/logout", data=data, headers=headers),
        client.post("/login", data={"secret": VIEWER_TOKEN}, headers=headers),
    ]
    assert [answer.status_code for answer in answers] == [403, 403, 403]
    assert site.pages.forms == []
    assert client.get("/").json()["name"] == "ada"


def test_an_own_origin_is_enough_if_the_browser_sends_nothing_else(site: Site) -> None:
    client = site.sign_in()
    answer = client.post("/act", data={"csrf_token": csrf_of(client)}, headers={"Origin": site.url})
    assert answer.status_code == 200


@pytest.mark.parametrize("kind", ["none", "empty", "wrong", "not ASCII", "of another session", "of another person"])
def test_a_form_without_the_token_of_its_session_is_refused(site: Site, kind: str) -> None:
    client = site.sign_in()
    tokens = {
        "empty": "",
        "wrong": csrf_of(client)[:-1] + "!",
        "not ASCII": "ü\ud7ff",
        "of another session": csrf_of(site.sign_in()),
        "of another person": csrf_of(site.sign_in(VIEWER_TOKEN)),
    }
    data = {"csrf_token": tokens[kind]} if kind in tokens else {"reason": "x"}
    assert client.post("/act", data=data, headers=OURS).status_code == 403
    assert site.pages.forms == []


def test_a_form_token_is_useless_to_another_site(site: Site) -> None:
    headers = {**bearer(OPERATOR_TOKEN), "Sec-Fetch-Site": "cross-site"}
    assert site.client().post("/act", headers=headers).status_code == 403


def test_only_get_head_and_post_are_allowed_and_every_act_is_a_post(site: Site) -> None:
    client = site.sign_in()
    assert client.get("/act").status_code == 405
    assert client.head("/").status_code == 200
    for method in ("PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "PROPFIND"):
        answer = client.request(method, "/act", headers=OURS)
        assert (answer.status_code, answer.headers["allow"]) == (405, "GET, HEAD, POST")


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("application/json", 415),
        ("multipart/form-data; boundary=x", 415),
        ("text/plain", 415),
        ("", 415),
        ("Application/X-WWW-Form-URLEncoded; charset=utf-8", 200),
    ],
)
def test_only_form_bodies_are_read(site: Site, kind: str, status: int) -> None:
    headers = {**bearer(OPERATOR_TOKEN), "Content-Type": kind}
    assert site.client().post("/act", content=b"a=b", headers=headers).status_code == status


def test_a_form_with_too_many_fields_is_refused(site: Site) -> None:
    client = site.client(headers=bearer(OPERATOR_TOKEN) | {"Content-Type": "application/x-www-form-urlencoded"})
    assert client.post("/act", content=b"&".join([b"a=1"] * 201)).status_code == 400
    assert client.post("/act", content=b"&".join([b"a=1"] * 200)).status_code == 200


@pytest.mark.parametrize(("body", "value"), [(b"a=\xff", "\xff"), (b"a=%FF", "\ufffd")], ids=["raw", "escaped"])
def test_a_form_that_is_not_utf_8_becomes_valid_text(site: Site, body: bytes, value: str) -> None:
    headers = {**bearer(OPERATOR_TOKEN), "Content-Type": "application/x-www-form-urlencoded"}
    assert site.client().post("/act", content=body, headers=headers).status_code == 200
    assert site.pages.forms == [{"a": value}]


# --- hosts and proxies ------------------------------------------------------------------------------------------------


def test_on_loopback_other_host_names_are_refused(open_site: OpenSite) -> None:
    site = open_site(Access.from_settings(web_settings(), hosts=LOOPBACK_NAMES))
    client = site.client(headers=bearer(OPERATOR_TOKEN))
    port = site.url.rpartition(":")[2]
    for host in ("localhost", f"LOCALHOST:{port}", "127.0.0.1", f"[::1]:{port}"):
        assert client.get("/", headers={"Host": host}).status_code == 200
    for host in (
        "evil.example",
        f"evil.example:{port}",
        "localhost.",
        "localhost.evil.example",
        "localhost:80:80",
        "a@localhost",
        "",
    ):
        for path in ("/", "/login", "/static/style.css"):
            refused = client.get(path, headers={"Host": host})
            assert refused.status_code == 400
            assert PAGE not in refused.text
    assert client.get("/healthz", headers={"Host": "10.1.2.3"}).status_code == 200


def test_host_names_in_the_settings_are_answered(open_site: OpenSite) -> None:
    settings = web_settings(web_hosts="outbox.example.org, Other.example.org")
    client = open_site(Access.from_settings(settings)).client(headers=bearer(OPERATOR_TOKEN))
    statuses = [
        client.get("/", headers={"Host": host}).status_code
        for host in ("outbox.example.org", "other.example.org:443", "127.0.0.1")
    ]
    assert statuses == [200, 200, 400]


def test_forwarded_addresses_are_ignored_without_a_trusted_proxy(open_site: OpenSite) -> None:
    headers = {**bearer(OPERATOR_TOKEN), "X-Forwarded-For": "198.51.100.7", "X-Forwarded-Proto": "https"}
    origins = []
    for proxies in (None, "192.0.2.0/24", "127.0.0.0/8"):
        settings = web_settings(web_trusted_proxies=proxies)
        site = open_site(Access.from_settings(settings), settings)
        origins.append(site.client().get("/", headers=headers).json()["origin"])
    assert origins == ["web 127.0.0.1", "web 127.0.0.1", "web 198.51.100.7"]


# --- guessing ---------------------------------------------------------------------------------------------------------


def test_guessing_is_rate_limited_by_address_and_the_right_token_still_works(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "pgoutbox.dashboard"):
        client = site.client()
        assert [post_sign_in(client, f"{CANARY}-{n}").status_code for n in range(5)] == [401] * 5
        for braked in (post_sign_in(client, CANARY), client.get("/", headers=bearer(CANARY))):
            assert braked.status_code == 429
            assert 1 <= int(braked.headers["retry-after"]) <= 13
            assert "set-cookie" not in braked.headers
        assert client.get("/", headers=bearer(OPERATOR_TOKEN)).status_code == 200
        assert post_sign_in(client, OPERATOR_TOKEN).status_code == 303
    assert events(caplog).count("web_sign_in_refused") == 5
    assert events(caplog).count("web_sign_in_braked") == 2
    assert CANARY not in logged(caplog)


def test_signed_in_users_are_not_affected_by_the_rate_limit(site: Site) -> None:
    client = site.sign_in()
    for n in range(7):
        post_sign_in(site.client(), f"wrong-{n}")
    assert client.get("/").status_code == 200


def test_successful_sign_ins_are_never_rate_limited(site: Site) -> None:
    assert [post_sign_in(site.client(), OPERATOR_TOKEN).status_code for _ in range(12)] == [303] * 12
    client = site.client(headers=bearer(VIEWER_TOKEN))
    assert [client.get("/").status_code for _ in range(12)] == [200] * 12


def test_successful_sign_ins_do_not_count_for_others(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site.access, "common_limit", RateLimiter(burst=2, interval_seconds=3600, capacity=1))
    assert [post_sign_in(site.client(), OPERATOR_TOKEN).status_code for _ in range(4)] == [303] * 4


def test_guessing_from_many_addresses_is_limited_in_total(open_site: OpenSite) -> None:
    settings = web_settings(web_trusted_proxies="127.0.0.1")
    site = open_site(Access.from_settings(settings), settings)
    client = site.client()

    def guess(number: int) -> int:
        headers = {**OURS, "X-Forwarded-For": f"198.51.100.{number}"}
        return client.post("/login", data={"secret": "wrong"}, headers=headers).status_code

    answers = [guess(number) for number in range(250)]
    assert answers[:60] == [401] * 60
    assert 429 in answers


def test_guesses_from_elsewhere_do_not_lock_out_an_address_that_has_signed_in(open_site: OpenSite) -> None:
    settings = web_settings(web_trusted_proxies="127.0.0.1", web_viewer_tokens=f"vera:{PASSWORD_HASH}")
    site = open_site(Access.from_settings(settings), settings)
    client = site.client()

    def sign_in(address: str, password: str) -> int:
        headers = {**OURS, "X-Forwarded-For": address}
        return client.post("/login", data={"name": "vera", "secret": password}, headers=headers).status_code

    def sign_in_rightly(address: str) -> int:
        return sign_in(address, PASSWORD)

    assert sign_in_rightly("203.0.113.1") == 303
    while site.access.common_limit.take("all") == 0:
        pass  # Wrong guesses from everywhere.
    assert sign_in_rightly("203.0.113.2") == 429
    assert sign_in_rightly("203.0.113.1") == 303
    assert [sign_in("203.0.113.1", "wrong") for _ in range(6)] == [401] * 5 + [429]


# --- headers, errors --------------------------------------------------------------------------------------------------


def assert_safe(headers: httpx.Headers) -> None:
    assert headers["content-security-policy"] == POLICY
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["x-frame-options"] == "DENY"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["cross-origin-opener-policy"] == "same-origin"
    assert headers["cross-origin-resource-policy"] == "same-origin"
    assert "camera=()" in headers["permissions-policy"]
    assert "server" not in headers
    assert "x-powered-by" not in headers
    assert all(len(headers.get_list(name)) == 1 for name in headers if name != "set-cookie")


def test_every_response_has_the_security_headers(site: Site) -> None:
    client = site.sign_in()
    answers = {
        200: client.get("/"),
        303: site.client(AS_BROWSER).get("/"),
        400: client.post("/act", data={f"field-{n}": "x" for n in range(301)}),
        401: site.client().get("/"),
        403: client.post("/act", headers=OURS),
        404: client.get("/nowhere"),
        405: client.put("/"),
        413: client.post("/act", data={"a": "x" * 70_000}),
        415: client.post("/act", content=b"x"),
        500: client.get("/broken"),
        429: [post_sign_in(site.client(), "wrong") for _ in range(6)][-1],
    }
    for status, answer in answers.items():
        assert answer.status_code == status
        assert_safe(answer.headers)
        assert answer.headers["cache-control"] == "no-store"
    for path in ("/login", "/healthz"):
        assert_safe(client.get(path).headers)


def test_only_static_files_may_be_cached(site: Site) -> None:
    static = site.client().get("/static/style.css")
    assert (static.status_code, static.headers["cache-control"]) == (200, "public, max-age=31536000")
    assert_safe(static.headers)
    assert site.client(headers=bearer(OPERATOR_TOKEN)).get("/").headers["cache-control"] == "no-store"
    assert site.client().post("/static/style.css").status_code == 401


@pytest.mark.parametrize("accept", ["*/*", "text/html"])
def test_a_failing_page_shows_no_details_and_logs_no_values(
    site: Site, caplog: pytest.LogCaptureFixture, accept: str
) -> None:
    answer = site.client(headers=bearer(OPERATOR_TOKEN)).get("/broken", headers={"Accept": accept})
    assert answer.status_code == 500
    for secret in (CANARY, "Traceback", "RuntimeError", "postgresql", "starlette", "uvicorn", "db.internal"):
        assert secret not in answer.text
        assert secret not in str(answer.headers)
    (record,) = [r.__dict__ for r in caplog.records if r.__dict__.get("event") == "web_page_failed"]
    assert (record["path"], record["error_type"]) == ("/broken", "RuntimeError")
    assert record["error_place"].startswith("tests.support.web_server:")
    assert CANARY not in logged(caplog)


def test_an_aborted_response_does_not_look_complete(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(httpx.RemoteProtocolError):
        site.client(headers=bearer(OPERATOR_TOKEN)).get("/cut")
    assert "web_page_failed" in events(caplog)
    assert CANARY not in logged(caplog)


def test_only_the_health_check_is_public(site: Site) -> None:
    answer = site.client().get("/healthz")
    assert (answer.status_code, answer.text) == (200, "ok\n")


# --- size, time and number --------------------------------------------------------------------------------------------


def head_of(site: Site, *headers: str, method: str = "POST", path: str = "/act") -> bytes:
    lines = [f"{method} {path} HTTP/1.1", f"Host: {site.url.removeprefix('http://')}", *headers, "", ""]
    return "\r\n".join(lines).encode()


AS_OPERATOR: Final = f"Authorization: Bearer {OPERATOR_TOKEN}"
AS_FORM: Final = "Content-Type: application/x-www-form-urlencoded"


@pytest.mark.parametrize("path", ["/act", "/login", "/"])
@pytest.mark.parametrize("who", [AS_OPERATOR, "X-Nobody: 1"])
def test_a_body_of_100_mb_is_refused_before_it_is_sent(site: Site, path: str, who: str) -> None:
    raw = site.raw()
    raw.send(head_of(site, who, AS_FORM, "Content-Length: 100000000", "Sec-Fetch-Site: same-origin", path=path))
    answer = raw.head()
    is_known = who == AS_OPERATOR or path == "/login"
    assert answer.startswith("http/1.1 413 " if is_known else "http/1.1 401 ")
    assert "connection: close" in answer
    raw.rest()


def test_a_body_without_a_length_is_read_only_up_to_the_limit(site: Site) -> None:
    raw = site.raw()
    raw.send(head_of(site, AS_OPERATOR, AS_FORM, "Transfer-Encoding: chunked"))
    chunk = b"1000\r\n" + b"x" * 4_096 + b"\r\n"
    raw.send(chunk * 17)
    assert raw.head().startswith("http/1.1 413 ")
    raw.rest()
    assert site.pages.forms == []


def test_a_body_of_exactly_the_limit_is_read(site: Site) -> None:
    client = site.client(headers=bearer(OPERATOR_TOKEN))
    assert client.post("/act", data={"a": "x" * 65_534}).status_code == 200
    assert client.post("/act", data={"a": "x" * 65_535}).status_code == 413


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET / HT",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX-Slow: 1\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\nGET /healthz HTTP/1.1\r\nHost: loc",
        f"POST /act HTTP/1.1\r\nHost: localhost\r\n{AS_OPERATOR}\r\n{AS_FORM}\r\nContent-Length: 9\r\n\r\na=".encode(),
        b"POST /login HTTP/1.1\r\nHost: a\r\nOrigin: http://a\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na",
    ],
    ids=["nothing", "line", "head", "second head", "body", "chunk"],
)
def test_an_incomplete_request_is_disconnected_after_the_timeout(
    site: Site, sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_RequestTimeoutProtocol, "request_seconds", 0.2)
    raw = site.raw()
    raw.send(sent)
    raw.rest()
    assert site.pages.forms == []


def test_single_bytes_do_not_extend_the_timeout(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_RequestTimeoutProtocol, "request_seconds", 0.2)
    raw = site.raw()
    raw.send(b"GET / HTTP/1.1\r\nX-Slow: ")
    raw.drip_until_closed()


def test_a_live_page_is_not_a_slow_request(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_RequestTimeoutProtocol, "request_seconds", 0.2)
    live, slow = site.raw(), site.raw()
    live.send(head_of(site, AS_OPERATOR, method="GET", path="/live"))
    assert live.head().startswith("http/1.1 200 ")
    live.read_until(b"data: first\n\n")
    slow.rest()
    site.pages.next_event.set()
    live.read_until(b"data: second\n\n")


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nX: a\x00b\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"a" * 33_000,
    ],
    ids=["TLS", "no host", "two hosts", "NUL", "negative", "two lengths", "long head"],
)
def test_invalid_http_is_refused_with_our_headers(site: Site, sent: bytes) -> None:
    raw = site.raw()
    raw.send(sent)
    answer = raw.head()
    assert answer.startswith("http/1.1 400 ")
    assert f"content-security-policy: {POLICY}" in answer
    assert "server:" not in answer


def test_connections_above_the_limit_are_refused_with_our_headers(open_site: OpenSite) -> None:
    settings = web_settings(web_connections=2)
    site = open_site(Access.from_settings(settings), settings)
    live = [site.raw(), site.raw()]
    for raw in live:
        raw.send(head_of(site, AS_OPERATOR, method="GET", path="/live"))
        raw.read_until(b"data: first\n\n")
    answer = site.raw().head()
    assert answer.startswith("http/1.1 503 ")
    assert f"content-security-policy: {POLICY}" in answer
    site.pages.next_event.set()
    for raw in live:
        raw.read_until(b"data: second\n\n")


@pytest.mark.parametrize("sent", [b"", b"GET /healthz HTTP/1.1\r\nHost: loc"], ids=["nothing", "half a head"])
def test_slow_clients_never_keep_a_probe_out(open_site: OpenSite, sent: bytes) -> None:
    settings = web_settings(web_connections=4)
    site = open_site(Access.from_settings(settings), settings)
    live = site.raw()
    live.send(head_of(site, AS_OPERATOR, method="GET", path="/live"))
    live.read_until(b"data: first\n\n")
    slow = [site.raw() for _ in range(4)]
    for raw in slow:
        raw.send(sent)
    assert site.client().get("/healthz").status_code == 200
    assert slow[0].rest() == b""  # The one that has waited longest is closed.
    site.pages.next_event.set()
    live.read_until(b"data: second\n\n")


def test_a_connection_that_has_had_its_answer_makes_room_too(open_site: OpenSite) -> None:
    settings = web_settings(web_connections=2)
    site = open_site(Access.from_settings(settings), settings)
    kept, other = site.raw(), site.raw()
    for raw in (kept, other):
        raw.send(head_of(site, method="GET", path="/healthz"))
        raw.read_until(b"ok\n")
    assert site.client().get("/healthz").status_code == 200
    kept.rest()
    other.send(head_of(site, method="GET", path="/healthz"))
    other.read_until(b"ok\n")


def test_websockets_are_refused(site: Site) -> None:
    raw = site.raw()
    upgrade = ("Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: eA==")
    raw.send(head_of(site, *upgrade, method="GET", path="/live"))
    assert raw.head().startswith("http/1.1 401 ")


# --- in a host application --------------------------------------------------------------------------------------------


def by_header(request: Request) -> Viewer | None:
    name = request.headers.get("x-user")
    return Viewer(name, "operator" if name == "ada" else "viewer") if name else None


async def by_header_later(request: Request) -> Viewer | None:
    return by_header(request)


@pytest.mark.parametrize("authenticate", [by_header, by_header_later])
def test_a_host_application_authenticates_users_and_forms_are_still_checked(
    open_site: OpenSite, authenticate: Authenticate
) -> None:
    site = open_site(Access.delegated(authenticate, load_settings()), root="/outbox")
    client = site.client()
    ada, vera = {"X-User": "ada", **OURS}, {"X-User": "vera", **OURS}
    assert client.get("/outbox/").status_code == 401
    assert client.get("/outbox/", headers=AS_BROWSER).status_code == 401
    told = client.get("/outbox/", headers=ada).json()
    assert (told["name"], told["role"], told["origin"]) == ("ada", "operator", "web 127.0.0.1")
    theirs = client.get("/outbox/", headers=vera).json()["csrf"]
    statuses = [
        client.post("/outbox/act", data={"csrf_token": token}, headers=headers).status_code
        for token, headers in [
            (told["csrf"], ada),
            ("", ada),
            (theirs, ada),
            (theirs, vera),
            (told["csrf"], {"X-User": "ada"}),
            (told["csrf"], {"X-User": "ada", "Sec-Fetch-Site": "cross-site"}),
        ]
    ]
    assert statuses == [200, 403, 403, 403, 403, 403]
    script = client.post("/outbox/act", headers={"X-User": "ada", "Authorization": "Bearer the application's own"})
    assert script.status_code == 200, "browsers do not send this header by themselves"
    assert client.get("/outbox/login", headers=ada).status_code == 404


@pytest.mark.parametrize(("name", "role"), [("", "operator"), (" ", "viewer"), ("bob", "root"), ("bob", "")])
def test_a_viewer_without_a_name_or_with_an_unknown_role_is_refused(
    open_site: OpenSite,
    name: str,
    role: Any,  # noqa: ANN401 - hosts without a type checker give any role
) -> None:
    access = Access.delegated(lambda _: Viewer(name, role), load_settings())
    answer = open_site(access).client().get("/")
    assert answer.status_code == 403
    assert "the role viewer or operator" in answer.text


def test_a_host_application_keeps_its_own_user(stack: ExitStack, hosts: HostServers) -> None:
    users: list[object] = []
    pages = Pages().app(Access.delegated(by_header, load_settings()))

    async def host(scope: Scope, receive: Receive, send: Send) -> None:
        scope["auth"] = scope["user"] = "the host's"
        await pages(scope, receive, send)
        users.append((scope["auth"], scope["user"], VIEWER in scope))

    url = stack.enter_context(hosts.serving(host))
    assert httpx.get(f"{url}/", headers={"X-User": "ada"}).json()["name"] == "ada"
    wait_until(lambda: users, lambda: "the end of the host's request")  # The answer may come before it.
    assert users[-1] == ("the host's", "the host's", False)


def test_without_a_sign_in_everybody_can_view_but_other_sites_cannot(open_site: OpenSite) -> None:
    site = open_site(Access.open_to_all("viewer", load_settings()))
    client = site.client()
    told = client.get("/").json()
    assert (told["name"], told["role"]) == ("anyone", "viewer")
    assert client.post("/act", data={"csrf_token": told["csrf"]}, headers=OURS).status_code == 403
    assert client.get("/", headers={"Host": "evil.example"}).status_code == 400
    operators = open_site(Access.open_to_all("operator", load_settings()))
    client = operators.client()
    data = {"csrf_token": csrf_of(client)}
    assert client.post("/act", data=data, headers={"Origin": "https://evil.example"}).status_code == 403
    assert client.post("/act", headers=OURS).status_code == 403
    assert client.post("/act", headers=OURS | bearer("any")).status_code == 403, "nobody has checked this token"
    assert client.post("/act", data=data, headers=bearer("any")).status_code == 403, "no sign of our own page"
    assert client.post("/act", data=data, headers=OURS).status_code == 200


def test_without_any_credentials_there_is_no_access() -> None:
    with pytest.raises(ConfigurationError, match="PGOUTBOX_WEB_OPERATOR_TOKENS"):
        Access.from_settings(load_settings())


def test_processes_with_one_secret_share_their_sessions(open_site: OpenSite) -> None:
    def port_of(site: Site) -> str:
        return site.url.rpartition(":")[2]

    settings = web_settings(web_secret="s" * 32)
    first, second, other = (
        open_site(Access.from_settings(one)) for one in (settings, settings, web_settings(web_secret="t" * 32))
    )
    ((_, cookie),) = first.sign_in().cookies.items()
    assert second.client(cookies={f"pgoutbox-{port_of(second)}": cookie}).get("/").status_code == 200
    assert other.client(cookies={f"pgoutbox-{port_of(other)}": cookie}).get("/").status_code == 401


def test_no_repr_contains_a_secret() -> None:
    settings = web_settings(web_secret=CANARY * 3)
    access = Access.from_settings(settings)
    shown = f"{settings!r} {settings} {settings.model_dump()} {access!r} {access} {Viewer('a', 'viewer', CANARY)!r}"
    assert CANARY not in shown
