"""Tests the status of the outbox as JSON: its stable names, and what it hides."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final

import httpx
import pytest

from pgoutbox.dashboard import create_app, reads
from pgoutbox.message import State
from tests.support.messages import put
from tests.support.roles import login
from tests.support.waiting import PROCESS_PATIENCE_SECONDS
from tests.support.web_server import VIEWER_TOKEN, serving, web_settings

if TYPE_CHECKING:
    from collections.abc import Iterator

    import psycopg

    from pgoutbox.dashboard.dashboard import Dashboard

CANARY: Final = "c4n4ry"
NAMES: Final = {
    "": {
        "time", "status", "verdict", "findings", "messages", "failed_of_day", "oldest_due_seconds", "queues",
        "breakers", "redirects", "is_copy", "workers",
    },
    "findings": {"check", "level", "code", "what", "why", "fix", "about", "messages"},
    "queues": {"queue", "due", "scheduled", "sending", "oldest_due_seconds", "paused_at", "resume_at"},
    "breakers": {"key", "opened_at", "retry_at", "last_error"},
    "workers": {"worker", "queues", "topics", "in_flight", "ended_at"},
}  # fmt: skip


class Site:
    """A dashboard, with the database's role of a viewer."""

    def __init__(self, url: str, dashboard: Dashboard) -> None:
        self.url = url
        self.dashboard = dashboard

    def get(self, token: str | None = VIEWER_TOKEN) -> httpx.Response:
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self.dashboard.forget()
        return httpx.get(f"{self.url}/status.json", headers=headers, timeout=PROCESS_PATIENCE_SECONDS, verify=False)

    def status(self) -> dict[str, Any]:
        answer = self.get()
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"] == "application/json"
        assert answer.headers["cache-control"] == "no-store"
        return dict(answer.json())


@pytest.fixture
def site(dsn: str) -> Iterator[Site]:
    with ExitStack() as stack:
        settings = web_settings(dsn=stack.enter_context(login(dsn, "pgoutbox_viewer")))
        app = create_app(settings)
        yield Site(stack.enter_context(serving(app, settings)), app.state.dashboard)


@pytest.mark.slow
def test_an_idle_outbox_has_every_name_and_the_worst_level_of_its_findings(site: Site, db: psycopg.Connection) -> None:
    found = site.status()
    assert (found["status"], [finding["code"] for finding in found["findings"]]) == ("warning", ["no-worker"])
    db.execute("INSERT INTO pgoutbox.worker (name, queues, topics) VALUES ('w1', '{default}', '{greet}')")
    found = site.status()
    assert found.keys() == NAMES[""]
    assert {name: found[name] for name in ("queues", "breakers", "failed_of_day", "oldest_due_seconds")} == {
        "queues": [],
        "breakers": [],
        "failed_of_day": 0,
        "oldest_due_seconds": None,
    }
    assert found["messages"]["pending"] == {"count": 0, "kind": "exactly"}
    assert found["messages"].keys() == {*State}
    assert found["redirects"] == {"switched": None, "workers": [], "blackout": None}
    assert (found["is_copy"], found["status"], found["findings"]) == (False, "ok", [])
    assert found["time"].endswith("+00:00")


@pytest.mark.slow
def test_a_busy_outbox_is_described_with_stable_names(site: Site, db: psycopg.Connection) -> None:
    late, scheduled = put(db, queue="mail"), put(db, queue="mail")
    db.execute("UPDATE pgoutbox.message SET available_at = now() - interval '3 hours' WHERE id = %s", [late])
    db.execute("UPDATE pgoutbox.message SET available_at = now() + interval '1 day' WHERE id = %s", [scheduled])
    put(db, State.SENDING, queue="bulk")
    failed_today, failed_before = put(db, State.FAILED), put(db, State.FAILED)
    db.execute("UPDATE pgoutbox.message SET finished_at = now() WHERE id = %s", [failed_today])
    db.execute("UPDATE pgoutbox.message SET finished_at = now() - interval '25 hours' WHERE id = %s", [failed_before])
    db.execute("INSERT INTO pgoutbox.queue (name, paused_at) VALUES ('mail', now())")
    db.execute("INSERT INTO pgoutbox.worker (name, queues, topics) VALUES ('w1', '{bulk}', '{greet}')")
    db.execute(
        "INSERT INTO pgoutbox.breaker (key, retry_at, cooldown_seconds, worker, last_error) "
        "VALUES ('smtp:mx:587', now() + interval '1 hour', 30, 'w1', %s)",
        [f"535 password={CANARY}"],
    )
    db.execute("SELECT pgoutbox.set_redirect('tester@example.org')")
    answer = site.get()
    found = answer.json()
    assert CANARY not in answer.text
    for part in ("findings", "queues", "breakers", "workers"):
        assert found[part], f"{part} is empty"
        assert {name for row in found[part] for name in row} == NAMES[part]
    (mail,) = [queue for queue in found["queues"] if queue["queue"] == "mail"]
    assert (mail["due"], mail["scheduled"], mail["sending"]) == (1, 1, 0)
    assert 10_700 < mail["oldest_due_seconds"] < 20_000
    assert found["oldest_due_seconds"] == mail["oldest_due_seconds"]
    assert mail["paused_at"].endswith("+00:00")
    assert found["failed_of_day"] == 1
    assert found["messages"]["failed"] == {"count": 2, "kind": "exactly"}
    assert found["redirects"]["switched"]["target"] == "tester@example.org"
    assert found["status"] in {"warning", "problem"}
    assert found["status"] == found["findings"][0]["level"]
    assert [breaker["key"] for breaker in found["breakers"]] == ["smtp:mx:587"]


@pytest.mark.slow
def test_large_numbers_end_at_their_caps(site: Site, db: psycopg.Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reads, "CAP", 2)
    monkeypatch.setattr(reads, "QUEUE_CAP", 2)
    for state in (State.FAILED, State.PENDING):
        for _ in range(4):
            put(db, state)
    db.execute("UPDATE pgoutbox.message SET finished_at = now() WHERE state = 'failed'")
    found = site.status()
    assert (found["failed_of_day"], found["queues"][0]["due"]) == (2, 2)
    assert found["messages"]["failed"] == {"count": 2, "kind": "at least"}


@pytest.mark.parametrize("token", [None, "x" * 40])
def test_only_viewers_see_the_status(site: Site, token: str | None) -> None:
    answer = site.get(token)
    assert (answer.status_code, answer.headers["www-authenticate"][:6]) == (401, "Bearer")
    assert "queues" not in answer.text


def test_a_copy_of_the_database_is_a_problem(site: Site, db: psycopg.Connection) -> None:
    db.execute("UPDATE pgoutbox.home SET database_id = 1, server_id = 1")
    found = site.status()
    assert (found["is_copy"], found["status"]) == (True, "problem")


def test_without_the_database_the_answer_is_503() -> None:
    settings = web_settings(dsn=f"postgresql://app:{CANARY}@127.0.0.1:1/app")
    app = create_app(settings)
    with serving(app, settings) as url:
        answer = Site(url, app.state.dashboard).get()
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
    assert CANARY not in answer.text
