"""Tests the dashboard of many databases: the list, and the dashboard of each below its name."""

from __future__ import annotations

import re
from contextlib import ExitStack
from typing import TYPE_CHECKING

import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

from pgoutbox.dashboard import create_app
from pgoutbox.dashboard import databases as databases_module
from tests.support.html_page import Page
from tests.support.many_databases import Databases, locked
from tests.support.waiting import PROCESS_PATIENCE_SECONDS, wait_until
from tests.support.web_server import OPERATOR_TOKEN, VIEWER_TOKEN, serving, web_settings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.conftest import Server

pytestmark = pytest.mark.slow

_OURS = {"Sec-Fetch-Site": "same-origin"}
_PAGES = ("", "messages", "failed", "queues", "workers", "breakers", "topics", "schedules", "audit")


class Site:
    """A dashboard of the databases, below a prefix or not."""

    def __init__(self, databases: Databases, stack: ExitStack) -> None:
        self._databases = databases
        self._stack = stack
        self.app: Starlette
        self.root = ""

    def open(self, *, root: str = "") -> httpx.Client:
        """Serve it, and return a browser without a session."""
        settings = web_settings(dsns=str(self._databases.file))
        self.app, self.root = create_app(settings), root
        self._stack.callback(self.app.state.dashboard.close)
        whole = Starlette(routes=[Mount(root, self.app)]) if root else self.app
        url = self._stack.enter_context(serving(whole, settings))
        client = httpx.Client(base_url=url, timeout=PROCESS_PATIENCE_SECONDS, headers={"Accept": "text/html"})
        return self._stack.enter_context(client)

    def sign_in(self, token: str = OPERATOR_TOKEN, *, root: str = "") -> httpx.Client:
        """Serve it, and return a browser that has signed in."""
        client = self.open(root=root)
        answer = client.post(f"{root}/login", data={"secret": token}, headers=_OURS)
        assert (answer.status_code, answer.headers["location"]) == (303, f"{root}/")
        return client


@pytest.fixture
def site(databases: Databases) -> Iterator[Site]:
    with ExitStack() as stack:
        yield Site(databases, stack)


def get(client: httpx.Client, path: str, status: int = 200) -> Page:
    answer = client.get(path)
    assert answer.status_code == status, answer.text
    return Page(answer.text)


def listed(page: Page) -> list[str]:
    """Return the names of the databases in their order."""
    return [found[1] for href in page.values("a", "href") if (found := re.fullmatch(r"(?:/ops)?/([^/]+)/", href))]


def list_with_all(client: httpx.Client, path: str = "/") -> Page:
    """Return the list once each database has been looked at."""
    wait_until(
        lambda: "not looked at yet" not in get(client, path).words,
        lambda: get(client, path).words,
    )
    return get(client, path)


def test_the_list_has_a_verdict_of_each_database_and_the_worst_first(
    databases: Databases, site: Site, server: Server
) -> None:
    databases.add("calm", "late", "copy", "locked")
    databases.add("bare", template="template1")
    databases.list("missing", server.dsn_for("there_is_no_such_database"))
    databases["calm"].execute(
        "INSERT INTO pgoutbox.worker (name, queues, topics) VALUES ('w1', '{default}', '{greet}')"
    )
    databases.enqueue("late", count=3)
    databases["late"].execute("UPDATE pgoutbox.message SET available_at = now() - interval '3 h'")
    databases["copy"].execute("UPDATE pgoutbox.home SET database_id = 1, server_id = 1")
    with locked(databases.dsn("locked")):
        page = list_with_all(site.sign_in(VIEWER_TOKEN))
    assert listed(page) == ["bare", "locked", "missing", "late", "copy", "calm"]
    assert "calm Messages are delivered. 1 0 - 0 " in page.words
    assert "late 3 messages are not delivered: no worker is running. 0 3 3 h 0 " in page.words
    assert "missing The database cannot be reached. - - - - " in page.words
    assert "copy It is a copy, so workers send nothing from it. 0 0 - 0 " in page.words
    assert re.search("locked (A query took longer than 2 s|Another transaction holds a lock)", page.words)
    assert "bare The schema pgoutbox is missing or too old" in page.words
    assert "there_is_no_such_database" not in page.text
    assert page.values("meta", "http-equiv") == []


@pytest.mark.parametrize("root", ["", "/ops"])
def test_the_dashboard_of_each_database_is_below_its_name(databases: Databases, site: Site, root: str) -> None:
    databases.add("one", "two.Two-2", "static")
    databases.enqueue("two.Two-2", "greet")
    client = site.sign_in(root=root)
    assert sorted(listed(get(client, f"{root}/"))) == ["one", "static", "two.Two-2"]
    for name in ("one", "two.Two-2", "static"):
        for path in _PAGES:
            answer = client.get(f"{root}/{name}/{path}")
            assert (answer.status_code, answer.headers["cache-control"]) == (200, "no-store"), path
            assert "default-src 'none'" in answer.headers["content-security-policy"]
            page = Page(answer.text)
            links = {href for href in page.values("a", "href") if not href.startswith("#")}
            strays = {href for href in links if not href.startswith(f"{root}/{name}/")}
            assert strays == {f"{root}/"}, "a link leads to another database"
            assert f"Databases {name} " in page.words
            for asset in (*page.values("link", "href"), *page.values("script", "src")):
                assert client.get(asset).status_code == 200
                assert "cache-control" not in client.get(asset).headers
    shown = client.get(f"{root}/one", follow_redirects=False)
    assert (shown.status_code, shown.headers["location"]) == (307, f"{root}/one/")
    assert client.get(f"{root}/two.Two-2/status.json").json()["messages"]["pending"]["count"] == 1
    assert client.get(f"{root}/one/status.json").json()["messages"]["pending"]["count"] == 0
    for path in ("nobody", "nobody/", "nobody/messages"):
        page = get(client, f"{root}/{path}", 404)
        assert f"{root}/" in page.values("a", "href")
    assert f"{root}/one/" in get(client, f"{root}/one/nothing", 404).values("a", "href")


def test_an_act_changes_the_database_of_its_page_and_no_other(databases: Databases, site: Site) -> None:
    databases.add("one", "two")
    for name in ("one", "two"):
        databases.enqueue(name, "greet")
    client = site.sign_in()
    ((message_id,),) = databases["two"].execute("SELECT id FROM pgoutbox.message").fetchall()
    page = get(client, f"/two/messages/{message_id}")
    (form,) = [form for form in page.forms if form.action.endswith("/cancel") or form.fields.get("act") == "cancel"]
    answer = client.post(form.action, data={**form.fields, "ids": str(message_id)}, headers=_OURS)
    assert answer.status_code in (200, 303), answer.text
    assert answer.headers.get("location", "/two/").startswith("/two/")

    def states(name: str) -> list[tuple[object, ...]]:
        return databases[name].execute("SELECT state FROM pgoutbox.message").fetchall()

    assert (states("one"), states("two")) == ([("pending",)], [("cancelled",)])


def test_one_sign_in_counts_for_all_databases_and_its_end_too(databases: Databases, site: Site) -> None:
    databases.add("one", "two")
    client = site.open()
    sent_to = client.get("/two/failed").headers["location"]
    assert sent_to == "/login?next=/two/failed"
    signed_in = client.post("/login", data={"secret": OPERATOR_TOKEN, "next": "/two/failed"}, headers=_OURS)
    assert signed_in.headers["location"] == "/two/failed"
    page = get(client, "/one/")
    (form,) = [form for form in page.forms if form.action.endswith("logout")]
    assert form.action == "/logout"
    assert client.post(form.action, data=form.fields, headers=_OURS).headers["location"] == "/login"
    for path in ("/", "/one/", "/two/", "/one", "/nobody/"):
        assert client.get(path).headers["location"].startswith("/login"), path


def test_a_page_follows_the_changes_of_its_database(
    databases: Databases, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    databases.add("one", "two")
    client = site.sign_in()
    monkeypatch.setattr(site.app.state.access.sessions, "needs_new_cookie", lambda session: True)
    assert "set-cookie" in client.get("/two/").headers
    assert 'data-live="/two/live"' in client.get("/two/").text
    assert "data-live" not in client.get("/").text
    with client.stream("GET", "/two/live", headers={"Accept": "text/event-stream"}) as stream:
        assert "set-cookie" not in stream.headers, "an open page extends its session"
        lines = stream.iter_lines()
        seen = next(line for line in lines if line.startswith("data:"))
        databases.enqueue("two")
        assert next(line for line in lines if line.startswith("data:")) != seen


def test_the_list_is_read_again_and_its_last_one_kept(
    databases: Databases, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(databases_module, "_LIST_SECONDS", 0.0)
    databases.add("one", "two")
    client = site.sign_in()
    assert sorted(listed(list_with_all(client))) == ["one", "two"]
    databases.add("three")
    databases.remove("one")
    assert get(client, "/three/").words
    assert sorted(listed(list_with_all(client))) == ["three", "two"]
    get(client, "/one/", 404)
    databases.file.write_text("two without\nnonsense\n")
    assert sorted(listed(list_with_all(client))) == ["three", "two"]


def test_looks_keep_no_connections_and_dashboards_only_while_they_are_used(
    databases: Databases, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    databases.add("one", "two")
    client = site.sign_in()
    list_with_all(client)

    def sessions() -> dict[str, int]:
        return dict(databases.sessions())

    wait_until(lambda: sessions() == {"one": 0, "two": 0}, lambda: f"{sessions()}")
    get(client, "/one/")
    assert sessions()["one"] > 0
    monkeypatch.setattr(databases_module, "_IDLE_SECONDS", 0.0)
    get(client, "/two/")
    wait_until(lambda: sessions()["one"] == 0, lambda: f"{sessions()}")
