"""Tests the dashboard in a Django project with Django's login, under runserver (WSGI) and uvicorn (ASGI)."""

from __future__ import annotations

import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import httpx
import psycopg
import pytest
from playwright.sync_api import expect

from pgoutbox.message import State
from tests.support.django_project import Project
from tests.support.messages import put
from tests.support.waiting import PROCESS_PATIENCE_SECONDS, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Browser

    from tests.conftest import Server

pytestmark = pytest.mark.slow

PASSWORD: Final = "a-password"
WITH_LOGIN: Final = """
INSTALLED_APPS += [f"django.contrib.{name}" for name in ("admin", "sessions", "messages")]
MIDDLEWARE = ["django.middleware.gzip.GZipMiddleware", "django.middleware.security.SecurityMiddleware"]
MIDDLEWARE += ["django.contrib.sessions.middleware.SessionMiddleware", "django.middleware.common.CommonMiddleware"]
MIDDLEWARE += ["django.middleware.csrf.CsrfViewMiddleware", "django.contrib.auth.middleware.AuthenticationMiddleware"]
MIDDLEWARE += ["django.contrib.messages.middleware.MessageMiddleware"]
MIDDLEWARE += ["django.middleware.clickjacking.XFrameOptionsMiddleware"]
TEMPLATES[0]["OPTIONS"] = {
    "context_processors": [
        f"django.{name}"
        for name in (
            "template.context_processors.request",
            "contrib.auth.context_processors.auth",
            "contrib.messages.context_processors.messages",
        )
    ]
}
STATIC_URL = "static/"
ALLOWED_HOSTS = ["127.0.0.1"]
DATABASES["default"]["ATOMIC_REQUESTS"] = True
"""
URLS: Final = """
import threading
from django.contrib import admin
from django.contrib.auth.views import LoginView
from django.http import JsonResponse
from django.urls import include, path

urlpatterns = [
    path("admin/", admin.site.urls),
    path("members/", LoginView.as_view(template_name="admin/login.html", next_page="/")),
    path("outbox/", include("pgoutbox.contrib.django.dashboard")),
    path("threads/", lambda request: JsonResponse({"names": [one.name for one in threading.enumerate()]})),
]
"""
# Another application serves it below a path.
ASGI: Final = """
import os
os.environ["DJANGO_SETTINGS_MODULE"] = "club.settings"
from django.core.asgi import get_asgi_application
from starlette.applications import Starlette
from starlette.routing import Mount

application = Starlette(routes=[Mount("/club", get_asgi_application())])
"""
USERS: Final = """
from django.contrib.auth.models import Permission, User
from django.contrib.contenttypes.models import ContentType
from django.core.management import call_command

call_command("migrate", verbosity=0)
kind, _ = ContentType.objects.get_or_create(app_label="pgoutbox", model="message")
may = {
    verb: Permission.objects.get_or_create(codename=f"{verb}_message", content_type=kind, defaults={"name": verb})[0]
    for verb in ("view", "change")
}
User.objects.create_superuser("root", None, "a-password")
for name, is_staff, verbs in (
    ("ada", True, ["change"]), ("grace", True, ["view", "change"]), ("vera", True, ["view"]),
    ("eve", True, []), ("mallory", False, ["view", "change"]),
):
    user = User.objects.create_user(name, None, "a-password", is_staff=is_staff)
    user.user_permissions.set(may[verb] for verb in verbs)
"""


@dataclass(frozen=True)
class Site:
    """A served project."""

    url: str
    dsn: str
    is_asgi: bool

    @property
    def prefix(self) -> str:
        return "/club/outbox" if self.is_asgi else "/outbox"

    @contextmanager
    def visitor(self, name: str | None = None) -> Iterator[httpx.Client]:
        """Sign in by a form of Django, and return a client of the dashboard."""
        with httpx.Client(base_url=self.url, timeout=PROCESS_PATIENCE_SECONDS) as client:
            if name is not None:
                login = f"{self.url.removesuffix('/outbox')}/members/"
                token = token_in(client.get(login).text, "csrfmiddlewaretoken")
                form = {"username": name, "password": PASSWORD, "csrfmiddlewaretoken": token}
                assert client.post(login, data=form).status_code == 302
            client.headers["Sec-Fetch-Site"] = "same-origin"
            yield client

    def threads(self) -> list[str]:
        """Return the threads of the server that belong to the dashboard."""
        names = httpx.get(f"{self.url.removesuffix('/outbox')}/threads/").json()["names"]
        return [name for name in names if "portal" in name or "AnyIO" in name]

    def sessions(self) -> int:
        """Return the number of open database sessions of the server."""
        with psycopg.connect(self.dsn) as connection:
            ((count,),) = connection.execute(
                "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() "
                "AND backend_type = 'client backend'"
            ).fetchall()
        return int(count)

    def put_failed(self) -> int:
        with psycopg.connect(self.dsn) as connection:
            return put(connection, State.FAILED)

    def state_of(self, message_id: int) -> str:
        with psycopg.connect(self.dsn) as connection:
            ((state,),) = connection.execute("SELECT state FROM pgoutbox.message WHERE id = %s", (message_id,))
        return str(state)

    def actors_of(self, message_id: int) -> list[str]:
        with psycopg.connect(self.dsn) as connection:
            rows = connection.execute("SELECT actor FROM pgoutbox.audit WHERE %s = ANY (message_ids)", (message_id,))
            return [str(actor) for (actor,) in rows]


def token_in(page: str, name: str = "csrf_token") -> str:
    found = re.search(rf'name="{name}" value="([^"]+)"', page)
    assert found is not None, page
    return found[1]


@pytest.fixture(scope="module")
def club(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    """Return a project with users, which includes the dashboard in its URLs."""
    directory = tmp_path_factory.mktemp("club")
    with server.database() as database:
        project = Project.create(directory, server.dsn_for(database), WITH_LOGIN)
        (directory / "club" / "urls.py").write_text(URLS)
        (directory / "club" / "asgi.py").write_text(ASGI)
        project.call("shell", "-v0", "-c", USERS)
        yield project


@pytest.fixture(scope="module", params=["wsgi", "asgi"])
def site(club: Project, request: pytest.FixtureRequest) -> Iterator[Site]:
    """Serve the project."""
    is_asgi = request.param == "asgi"
    command = ["-m", "uvicorn", "club.asgi:application", "--port", "0"]
    if not is_asgi:
        command = ["-W", "error", "manage.py", "runserver", "--noreload", "127.0.0.1:0"]
    with (club.directory / f"{request.param}.log").open("w+") as log:
        process = subprocess.Popen(
            [sys.executable, "-u", *command], cwd=club.directory, stdout=log, stderr=subprocess.STDOUT
        )
        try:

            def url() -> str | None:
                assert process.poll() is None, shown()
                found = re.search(r"http://127\.0\.0\.1:[1-9]\d*", shown())
                return found[0] if found else None

            def shown() -> str:
                log.seek(0)
                return log.read()

            yield Site(f"{wait_until(url, shown)}{'/club' if is_asgi else ''}/outbox", club.dsn, is_asgi)
            assert "Traceback" not in shown(), shown()
        finally:
            process.kill()
            process.wait()


# --- permissions ------------------------------------------------------------------------------------------------------


def test_a_stranger_signs_in_first_and_scripts_and_users_without_the_right_are_refused(site: Site) -> None:
    with site.visitor() as stranger:
        asked = stranger.get("/messages?state=failed", headers={"Accept": "text/html"})
        assert asked.status_code == 302
        root = site.prefix.removesuffix("/outbox")
        assert asked.headers["location"] == f"{root}/admin/login/?next={site.prefix}/messages%3Fstate%3Dfailed"
        for answer in (
            stranger.get("/", headers={"X-Pgoutbox-Live": "1"}),
            stranger.get("/live", headers={"Accept": "text/event-stream"}),
            stranger.post("/queues/default/pause"),
        ):
            assert answer.status_code == 403
    for name in ("eve", "mallory"):
        with site.visitor(name) as user:
            assert user.get("/").status_code == 403


def test_a_viewer_sees_and_an_operator_acts_and_the_audit_names_the_user(site: Site) -> None:
    failed = site.put_failed()
    with site.visitor("vera") as vera, site.visitor("ada") as ada, site.visitor("root") as root:
        assert "csrf_token" not in vera.get(f"/messages/{failed}").text
        form = {"csrf_token": token_in(root.get("/queues").text)}
        assert vera.post(f"/messages/{failed}/redrive", data=form).status_code == 403
        form = {"csrf_token": token_in(ada.get(f"/messages/{failed}").text)}
        done = ada.post(f"/messages/{failed}/redrive", data=form)
        assert (done.status_code, done.headers["location"].partition("?")[0]) == (
            303,
            f"{site.prefix}/messages/{failed}",
        )
    assert (site.state_of(failed), site.actors_of(failed)) == ("pending", ["ada"])


@pytest.fixture(scope="module")
def tokens() -> set[str]:
    """Collect the tokens of one user in several processes."""
    return set()


def test_a_form_that_is_forged_or_has_no_own_token_is_refused(site: Site, tokens: set[str]) -> None:
    failed = site.put_failed()
    with site.visitor("ada") as ada, site.visitor("grace") as grace:
        path, own = f"/messages/{failed}/redrive", {"csrf_token": token_in(ada.get(f"/messages/{failed}").text)}
        others = {"csrf_token": token_in(grace.get(f"/messages/{failed}").text)}
        refused = [
            ada.post(path, data=own, headers={"Sec-Fetch-Site": "cross-site"}),
            ada.post(path, data=own, headers={"Origin": "https://evil.example.org"}),
            ada.post(path),
            ada.post(path, data=others),
            ada.post(path, headers={"Authorization": "Bearer a-token-of-the-application"}),
            ada.post(path, data={**own, "more": "x" * 70_000}),
        ]
        del ada.headers["Sec-Fetch-Site"]
        refused.append(ada.post(path, data=own))
    tokens.add(own["csrf_token"])
    assert len(tokens) == 1
    assert [answer.status_code for answer in refused] == [403, 403, 403, 403, 403, 413, 403]
    assert (site.state_of(failed), site.actors_of(failed)) == ("failed", [])


# --- pages ------------------------------------------------------------------------------------------------------------


def test_pages_keep_the_prefix_and_their_headers(site: Site) -> None:
    with site.visitor("vera") as vera:
        page = vera.get("/")
        assert page.status_code == 200
        paths = re.findall(r'(?:href|src|action|data-live)="(/[^"]*)"', page.text)
        assert len(paths) > 10
        assert [path for path in paths if not path.startswith(f"{site.prefix}/")] == []
        assert page.headers["x-frame-options"] == "DENY"
        assert page.headers["referrer-policy"] == "no-referrer"
        assert page.headers["cache-control"] == "no-store"
        assert vera.get("/static/pgoutbox.css").headers["content-type"] == "text/css; charset=utf-8"
        assert vera.get("/status.json").json()["messages"]
        assert vera.get("/messages/999999999").status_code == 404
        assert "no such page" not in vera.get("/nowhere").text
        assert vera.get("/nowhere").status_code == 404
        assert vera.put("/").status_code == 405
        assert vera.get("/", headers={"Host": "evil.example.org"}).status_code == 400
        assert vera.get("/messages?text=%F0%9F%90%98").status_code == 200
        assert vera.head("/").status_code == 200


def test_no_thread_and_no_session_outlives_the_requests(site: Site) -> None:
    with site.visitor("vera") as vera, ThreadPoolExecutor(8) as pool:
        paths = ["/", "/messages", "/failed", "/queues", "/static/pgoutbox.js", "/audit", "/live"] * 5
        assert {answer.status_code for answer in pool.map(vera.get, paths)} == {200}
    wait_until(lambda: site.sessions() == 0, lambda: f"{site.sessions()} sessions")
    wait_until(lambda: site.threads() == [], lambda: str(site.threads()))


def test_live_pages_poll(site: Site) -> None:
    with site.visitor("vera") as vera:
        assert vera.get("/live").text == "event: replaced\ndata:\n\n"


LISTEN: Final = """() => new Promise((resolve) => {
    const source = new EventSource(document.body.dataset.live);
    for (const name of ["change", "replaced"]) source.addEventListener(name, () => { source.close(); resolve(name); });
    setTimeout(resolve, 30_000, "nothing");
})"""


def test_in_a_browser_an_operator_signs_in_by_the_admin_and_redrives_a_message(site: Site, browser: Browser) -> None:
    failed = site.put_failed()
    with closing(browser.new_context()) as context:
        page = context.new_page()
        page.goto(f"{site.url}/messages/{failed}")
        page.get_by_label("Username").fill("grace")
        page.get_by_label("Password").fill(PASSWORD)
        page.get_by_role("button", name="Log in").click()
        page.get_by_role("button", name="Redrive").first.click()
        expect(page).to_have_url(re.compile(rf"{site.url}/messages/{failed}\?done="))
        page.get_by_role("link", name="Audit").click()
        expect(page.get_by_role("cell", name="grace").first).to_be_visible()
        expect(page.locator("#live")).to_have_text("Every 20 s")
        heard = page.evaluate(LISTEN)
    assert heard == "replaced"
    assert (site.state_of(failed), site.actors_of(failed)) == ("pending", ["grace"])


# --- without the extra, and in tests of the project -------------------------------------------------------------------


def test_without_the_extra_the_page_names_it_and_other_urls_work(club: Project) -> None:
    program = """
import sys
sys.modules["starlette"] = None
from django.contrib.auth.models import User
from django.core.management import call_command
from django.test import Client
from django.urls import reverse

print(reverse("admin:index"))
visitor = Client(SERVER_NAME="127.0.0.1")
visitor.force_login(User.objects.get(username="root"))
call_command("check")
try:
    visitor.get("/outbox/")
except Exception as error:
    print(type(error).__name__, error)
"""
    shown = club.call("shell", "-v0", "-c", program)
    assert "MissingExtraError the dashboard needs an optional dependency: pip install 'pgoutbox[web]'" in shown
    assert "/admin/" in shown


TESTS: Final = """
import urllib.request
from django.contrib.auth.models import User
from django.db import connection, transaction
from django.test import LiveServerTestCase, TestCase
from pgoutbox.contrib.django import outbox


class LiveTest(LiveServerTestCase):
    def test_the_page_shows_the_test_database(self):
        with transaction.atomic():
            outbox.on(connection).enqueue("mail.welcome", {}, destination="mailto:only.here@example.org")
        self.client.force_login(User.objects.create_superuser("root"))
        cookie = f"sessionid={self.client.cookies['sessionid'].value}"
        asked = urllib.request.Request(f"{self.live_server_url}/outbox/messages", headers={"Cookie": cookie})
        with urllib.request.urlopen(asked) as answer:
            self.assertIn("only.here@example.org", answer.read().decode())


class ViewTest(TestCase):
    def test_the_clients_see_pages_in_the_transaction_of_the_test(self):
        self.client.force_login(User.objects.create_superuser("root"))
        self.assertContains(self.client.get("/outbox/"), "Overview")

    async def test_the_async_client_sees_pages_and_streams(self):
        user = await User.objects.acreate(username="root", is_staff=True, is_superuser=True)
        await self.async_client.aforce_login(user)
        self.assertContains(await self.async_client.get("/outbox/"), "Overview")
        self.assertTrue(await User.objects.aexists())
"""


def test_tests_of_the_project_see_the_test_database_and_can_drop_it(club: Project) -> None:
    (club.directory / "members" / "tests.py").write_text(TESTS)
    assert "Ran 3 tests" in club.call("test")
