"""Tests the dashboard's pages on a real database over HTTP: contents, actions and refusals."""

from __future__ import annotations

import itertools
import re
import threading
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final, LiteralString
from urllib.parse import urlencode

import httpx
import psycopg
import psycopg.sql
import pytest
from cryptography.fernet import Fernet
from fastapi import FastAPI
from psycopg.types.json import Jsonb
from starlette.applications import Starlette
from starlette.routing import Mount

from pgoutbox import Outbox, Topic
from pgoutbox.dashboard import app as app_module
from pgoutbox.dashboard import bulk, create_app, database, history, inputs, live, reads, rendering
from pgoutbox.database import sql
from pgoutbox.doctor.context import DoctorContext, RankedQueue
from pgoutbox.message import ReasonCode, State
from pgoutbox.operations import MessageFilter, Operator, Rate, window
from pgoutbox.operations.records import WAITS
from pgoutbox.settings import load_settings
from tests.support import topics_app
from tests.support.html_page import Page
from tests.support.messages import ADD_ATTEMPT, PUT_SENDING, SET_LAST_ERROR, before_each_batch, meanwhile, put
from tests.support.outbox_actions import due_earlier, enqueue, state_of
from tests.support.proxy import Moment, proxy_to
from tests.support.roles import login
from tests.support.waiting import PROCESS_PATIENCE_SECONDS, wait_until
from tests.support.web_server import OPERATOR_TOKEN, VIEWER_TOKEN, HostServers, serving, web_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from psycopg.rows import DictRow

    from pgoutbox.dashboard.dashboard import Dashboard
    from tests.conftest import Connect

pytestmark = pytest.mark.slow

CANARY: Final = "c4n4ry-s3cret"
HOSTILE: Final = "</pre></script><script>alert(1)</script><img src=x onerror=alert(2)>'\"&\u2028\u202e{{ 7 * 7 }}"
HOSTILE_DESTINATION: Final = "javascript:alert(3)//<b onmouseover=alert(4)>"
AS_BROWSER: Final = {"Accept": "text/html"}


class Site:
    """A dashboard on the test's database."""

    def __init__(self, url: str, dashboard: Dashboard, stack: ExitStack) -> None:
        self.url = url
        self.dashboard = dashboard
        self._stack = stack
        self.ada = self.client(OPERATOR_TOKEN)
        self.vera = self.client(VIEWER_TOKEN)

    def client(self, token: str) -> httpx.Client:
        """Return a browser that is signed in with this token."""
        headers = {"Authorization": f"Bearer {token}", **AS_BROWSER}
        return self._stack.enter_context(
            httpx.Client(base_url=self.url, timeout=PROCESS_PATIENCE_SECONDS, headers=headers, verify=False)
        )


@pytest.fixture(scope="module")
def hosts() -> Iterator[HostServers]:
    with ExitStack() as opened:
        yield HostServers(opened)


@pytest.fixture
def open_site(hosts: HostServers) -> Iterator[Callable[..., Site]]:
    """Serve a dashboard until the end of the test."""
    with ExitStack() as stack:

        def open_one(dsn: str, outbox: Outbox | None = None, **given: object) -> Site:
            settings = web_settings(dsn=dsn, **given)
            app = create_app(outbox or settings, settings=settings)
            stack.callback(app.state.dashboard.close)
            url = stack.enter_context(hosts.serving(app))
            return Site(url, app.state.dashboard, stack)

        yield open_one


@pytest.fixture
def site(dsn: str, open_site: Callable[..., Site]) -> Site:
    return open_site(dsn)


def get(client: httpx.Client, path: str, status: int = 200) -> Page:
    answer = client.get(path)
    assert answer.status_code == status, answer.text
    return Page(answer.text)


def ids_on(page: Page) -> list[int]:
    found = [re.fullmatch(r"/messages/(\d+)", href) for href in page.values("a", "href")]
    return list(dict.fromkeys(int(one[1]) for one in found if one))


def audit_of(db: psycopg.Connection) -> list[tuple[object, ...]]:
    return db.execute(
        "SELECT actor, origin, action, queue, message_ids, details FROM pgoutbox.audit ORDER BY id"
    ).fetchall()


def fail_with(db: psycopg.Connection, error: str, *, topic: str = "mail", redrivable: bool = True) -> int:
    message_id = put(db, State.FAILED, topic=topic)
    db.execute("UPDATE pgoutbox.message_failed SET last_error = %s WHERE id = %s", [error, message_id])
    return message_id


# --- contents ---------------------------------------------------------------------------------------------------------


def test_the_overview_counts_every_state(site: Site, db: psycopg.Connection) -> None:
    for state, count in zip(State, range(1, 7), strict=True):
        for _ in range(count):
            put(db, state, queue=f"q-{state}")
    page = get(site.vera, "/")
    for state, count in zip(State, range(1, 7), strict=True):
        assert f"{state} {count} exact" in page.words
    assert "q-pending 1" in page.words
    assert "q-sent" not in page.words
    assert "w 2 0" in page.words, "the worker with leases is missing"


def test_the_overview_of_a_host_with_only_cron_shows_the_last_run(site: Site, db: psycopg.Connection) -> None:
    """Its row does not tell `--once` from `--drain`."""
    assert "No worker runs." in get(site.vera, "/").words
    db.execute(
        "INSERT INTO pgoutbox.worker (name, queues, topics, ended_at)"
        " VALUES ('cron', '{default}', '{greet}', now() - interval '3 days')"
    )
    site.dashboard.forget()
    assert "cron last run, ended 3 d" in get(site.vera, "/").words


def test_the_overview_shows_the_queues_and_topics_of_idle_workers(site: Site, db: psycopg.Connection) -> None:
    assert "No worker runs." in get(site.vera, "/").words
    db.execute("INSERT INTO pgoutbox.worker (name, queues, topics) VALUES ('idle', '{bulk,default}', '{bye,greet}')")
    site.dashboard.forget()
    assert "idle 0 0 bulk, default bye, greet" in get(site.vera, "/").words


def test_the_overview_shows_how_long_the_oldest_due_message_has_waited(site: Site, db: psycopg.Connection) -> None:
    assert "Oldest due message none" in get(site.vera, "/").words
    waiting, later = put(db), put(db)
    db.execute("UPDATE pgoutbox.message SET available_at = now() - interval '3 hours' WHERE id = %s", [waiting])
    db.execute("UPDATE pgoutbox.message SET available_at = now() + interval '1 day' WHERE id = %s", [later])
    site.dashboard.forget()
    assert "Oldest due message 3 h" in get(site.vera, "/").words


def test_the_overview_charts_the_last_hour(site: Site, db: psycopg.Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "_BUDGET_SECONDS", PROCESS_PATIENCE_SECONDS)
    for minutes in (1, 1, 7):
        put(db, State.SENT, age=timedelta(minutes=minutes))
    put(db, State.SENT, age=timedelta(hours=2))
    page = get(site.vera, "/")
    assert "3 sent in 1h, at most 2 in a minute" in page.values("svg", "aria-label")


def test_a_past_minute_is_counted_once(site: Site, db: psycopg.Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "_BUDGET_SECONDS", PROCESS_PATIENCE_SECONDS)
    message_id = put(db, State.SENT, age=timedelta(minutes=10))
    get(site.vera, "/")
    db.execute("DELETE FROM pgoutbox.message WHERE id = %s", [message_id])
    site.dashboard.forget()
    assert "1 sent in 1h, at most 1 in a minute" in get(site.vera, "/").values("svg", "aria-label")


def test_a_slow_count_of_the_hour_is_done_in_parts(
    site: Site, db: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "_BUDGET_SECONDS", 0)
    put(db, State.SENT, age=timedelta(minutes=58))
    begun = []
    while found := re.search(r"Still counting: since (\S+ \S+) UTC so far", get(site.vera, "/").words):
        begun.append(found[1])
        site.dashboard.forget()
    assert len(begun) > 2
    assert begun == sorted(begun, reverse=True)
    assert "1 sent in 1h, at most 1 in a minute" in get(site.vera, "/").values("svg", "aria-label")


def test_sent_and_failed_messages_are_charted_in_a_range(
    site: Site, db: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "_BUDGET_SECONDS", PROCESS_PATIENCE_SECONDS)
    for hours in (0.5, 5, 20, 300, 400):
        put(db, State.SENT, age=timedelta(hours=hours))
        put(db, State.FAILED, age=timedelta(hours=hours))
        put(db, State.CANCELLED, age=timedelta(hours=hours))
    for asked, sent in (("1h", 1), ("6h", 2), ("24h", 3), ("14d", 4)):
        page = get(site.vera, f"/?range={asked}")
        labels = page.values("svg", "aria-label")
        # By the time of day, the last two of a fortnight are in one part of six hours or in two.
        most = "[12]" if asked == "14d" else 1
        for state in ("sent", "failed"):
            pattern = f"{sent} {state} in {asked}, at most {most} in "
            assert [bool(re.match(pattern, label)) for label in labels].count(True) == 1, pattern
        assert f"/?range={asked}" in page.values("a", "href")
        assert "Still counting" not in page.words


def test_a_past_time_of_a_long_range_is_counted_once(site: Site, db: psycopg.Connection) -> None:
    message_id = put(db, State.SENT, age=timedelta(hours=3))
    told_on(site, "/?range=24h")
    db.execute("DELETE FROM pgoutbox.message WHERE id = %s", [message_id])
    put(db, State.SENT)
    site.dashboard.forget()
    labels = get(site.vera, "/?range=24h").values("svg", "aria-label")
    assert "2 sent in 24h, at most 1 in 30 minutes" in labels


def test_a_slow_count_of_a_long_range_is_done_in_parts(
    site: Site, db: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(db, State.SENT, age=timedelta(minutes=345))
    begun = []
    with monkeypatch.context() as counting:
        counting.setattr(history, "_BUDGET_SECONDS", 0)
        for _ in range(40):
            found = re.search(r"Still counting: since (\S+ \S+) UTC so far", get(site.vera, "/?range=6h").words)
            site.dashboard.forget()
            assert found is not None
            begun.append(found[1])
    # Before ten minutes are counted, the time of the page stands there, which goes on.
    slots = [at for at in begun if at.endswith("0:00")]
    assert slots == sorted(begun[-len(slots) :], reverse=True)
    assert len(set(slots)) > 2
    monkeypatch.setattr(history, "_BUDGET_SECONDS", PROCESS_PATIENCE_SECONDS)
    assert "1 sent in 6h, at most 1 in 10 minutes" in get(site.vera, "/?range=6h").values("svg", "aria-label")


def test_large_numbers_of_final_messages_are_marked_as_estimates(
    site: Site, db: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reads, "CAP", 5)
    for _ in range(8):
        put(db, State.SENT)
    put(db, State.FAILED)
    assert "at least" in get(site.vera, "/").words, "before ANALYZE there is no estimate"
    db.execute("ANALYZE pgoutbox.message")
    site.dashboard.forget()
    page = get(site.vera, "/")
    assert "sent 8 estimated" in page.words
    assert "failed 1 exact" in page.words


def test_open_breakers_are_shown_without_secrets(site: Site, db: psycopg.Connection) -> None:
    db.execute(
        """
        INSERT INTO pgoutbox.breaker (key, retry_at, cooldown_seconds, worker, last_error)
        VALUES ('smtp mail.example.org', now() + interval '1 minute', 30, 'w', %s)
        """,
        [f"refused password={CANARY}"],
    )
    page = get(site.vera, "/breakers")
    assert "smtp mail.example.org" in page.words
    assert CANARY not in page.text
    assert "(redacted)" in page.text


FILTERS: Final[list[tuple[dict[str, object], list[int]]]] = [
    ({}, [0, 1, 2, 3]),
    ({"state": "failed"}, [1]),
    ({"state": ["pending", "sent"]}, [0, 2]),
    ({"topic": "sms"}, [2]),
    ({"queue": "bulk"}, [1]),
    ({"destination": "mailto:a@example.org"}, [0]),
    ({"key": "user-7"}, [0]),
    ({"key": "once"}, [3]),
    ({"text": "NO SUCH mail"}, [1, 2, 3]),
    ({"text": "%"}, []),
    ({"text": "_"}, []),
    ({"text": "mailto:A"}, [0]),
    ({"created_from": "2026-01-01T00:00"}, [1, 2, 3]),
    ({"created_before": "2026-01-01T00:00"}, [0]),
    ({"created_before": "2025-12-31T14:01+02:00", "created_from": "2025-12-31T12:00"}, [0]),
    ({"created_before": "2025-12-31T12:00"}, []),
    ({"state": "sending"}, []),
    ({"topic": "sms", "queue": "bulk"}, []),
]


def test_messages_are_found_by_each_filter(site: Site, db: psycopg.Connection) -> None:
    ids = [
        put(db, destination="mailto:a@example.org", coalesce_key="user-7"),
        put(db, State.FAILED, queue="bulk"),
        put(db, State.SENT, topic="sms"),
        put(db, State.CANCELLED, dedupe_key="once"),
    ]
    db.execute("UPDATE pgoutbox.message SET created_at = '2025-12-31 12:00Z' WHERE id = %s", [ids[0]])
    for parameters, expected in FILTERS:
        page = get(site.vera, f"/messages?{urlencode(parameters, doseq=True)}")
        assert ids_on(page) == [ids[index] for index in expected][::-1], parameters


def test_messages_in_flight_are_found(site: Site, db: psycopg.Connection) -> None:
    put(db)
    sending = [put(db, State.SENDING) for _ in range(3)]
    page = get(site.vera, "/messages?state=sending&limit=2")
    assert ids_on(page) == sending[:0:-1]
    (following,) = [href for href in page.values("a", "href") if "before=" in href]
    assert ids_on(get(site.vera, following)) == sending[:1]


def test_pages_continue_by_id(site: Site, db: psycopg.Connection) -> None:
    ids = [put(db, State.FAILED if number % 2 else State.SENT) for number in range(7)]
    seen, path = [], "/messages?limit=3"
    while path:
        page = get(site.vera, path)
        seen.append(ids_on(page))
        put(db)
        path = next((href for href in page.values("a", "href") if "before=" in href), "")
    assert seen == [ids[:3:-1], ids[3:0:-1], ids[:1]]


def test_a_search_with_few_results_stops_and_can_be_continued(
    site: Site, db: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reads, "SEARCH_ROWS", 5)
    monkeypatch.setattr(reads, "SEARCH_SECONDS", 0.0)
    rare = put(db, State.SENT, topic="rare")
    others = [put(db, State.SENT) for _ in range(12)]
    page = get(site.vera, "/messages?topic=rare")
    assert ids_on(page) == []
    assert f"Searched 5 messages, down to id {others[-5]}" in page.words
    steps = 0
    while not ids_on(page):
        (following,) = [href for href in page.values("a", "href") if "before=" in href]
        page, steps = get(site.vera, following), steps + 1
    assert (ids_on(page), steps) == ([rare], 2)


def test_a_search_of_messages_in_flight_reaches_all_of_them(
    site: Site, db: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest claim is read first without an order."""
    monkeypatch.setattr(reads, "SEARCH_ROWS", 3)
    monkeypatch.setattr(reads, "SEARCH_SECONDS", PROCESS_PATIENCE_SECONDS)
    rare, *ids = [put(db, State.SENDING, topic=topic) for topic in ("rare", *["mail"] * 7)]
    assert ids_on(get(site.vera, "/messages?state=sending")) == [*ids[::-1], rare]
    assert ids_on(get(site.vera, "/messages?state=sending&topic=rare")) == [rare]
    seen, path = [], "/messages?state=sending&limit=2"
    while path:
        page = get(site.vera, path)
        seen += ids_on(page)
        path = next((href for href in page.values("a", "href") if "before=" in href), "")
    assert seen == [*ids[::-1], rare]


def test_a_search_of_texts_that_take_long_is_answered_in_parts(
    site: Site, db: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each text is redacted before it is compared. One statement for all of them exceeded its timeout."""
    monkeypatch.setattr(window, "_FIRST_ROWS", 100)
    monkeypatch.setattr(database, "STATEMENT_SECONDS", 1.0)
    monkeypatch.setattr(reads, "SEARCH_SECONDS", PROCESS_PATIENCE_SECONDS)
    oldest = put(db, State.FAILED, topic="rare")
    db.execute(
        "INSERT INTO pgoutbox.message"
        " (topic, payload, state, attempt_count, worker, claimed_at, finished_at, last_error)"
        " SELECT 'mail', '{}', 'failed', 1, 'w', now(), now(), 'the token has expired ' || repeat('x', 300) || n"
        " FROM generate_series(1, 12000) AS n"
    )
    db.execute("UPDATE pgoutbox.message SET last_error = 'no such vat_id' WHERE id = %s", [oldest])
    assert ids_on(get(site.vera, "/messages?text=vat_id")) == [oldest]
    assert "1 message matches" in get(site.ada, "/bulk?do=redrive&text=vat_id").words


def test_long_texts_below_short_ones_do_not_end_a_search(
    site: Site, db: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The window grows on short texts, so that the first statement with long ones exceeds its timeout."""
    monkeypatch.setattr(database, "STATEMENT_SECONDS", 0.5)
    monkeypatch.setattr(reads, "SEARCH_SECONDS", PROCESS_PATIENCE_SECONDS)
    oldest = fail_with(db, "no such vat_id")
    db.execute(
        "INSERT INTO pgoutbox.message"
        " (topic, payload, state, attempt_count, worker, claimed_at, finished_at, last_error)"
        " SELECT 'mail', '{}', 'failed', 1, 'w', now(), now(), repeat('https://example.org/?token=a&b=1 ', 100)"
        " FROM generate_series(1, 150)"
    )
    db.execute("INSERT INTO pgoutbox.message (topic, payload) SELECT 'mail', '{}' FROM generate_series(1, 2000)")
    assert ids_on(get(site.vera, "/messages?text=vat_id")) == [oldest]
    assert "1 message matches" in get(site.ada, "/bulk?do=redrive&text=vat_id").words


def test_a_viewer_cannot_search_for_values_that_a_topic_hides(
    db: psycopg.Connection, dsn: str, open_site: Callable[..., Site]
) -> None:
    outbox = Outbox(web_settings(dsn=dsn))
    outbox.define(Topic("kyc.check", redact=("ssn",)))
    site = open_site(dsn, outbox)
    hidden = fail_with(db, "ValueError: ssn=123-45 is wrong", topic="kyc.check")
    keyed = put(db, topic="kyc.check", ordering_key="ssn=123 of a key")
    fair = put(db, topic="kyc.check", fair_key="ssn=123 of a tenant")
    other = fail_with(db, "ssn=123", topic="mail")
    for text, found in [("ssn=123", [other, fair, keyed]), ("ssn=12", [other, fair, keyed]), ("valueerror", [hidden])]:
        assert ids_on(get(site.vera, f"/messages?{urlencode({'text': text})}")) == found
    assert ids_on(get(site.vera, "/messages?text=ssn%3D123&limit=1")) == [other]
    assert hidden in ids_on(get(site.ada, "/messages?text=ssn%3D123")), "an act on all matches would reach it"


def test_a_bare_address_finds_all_messages_to_it_of_any_age(
    site: Site, db: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reads, "SEARCH_ROWS", 5)
    monkeypatch.setattr(reads, "SEARCH_SECONDS", PROCESS_PATIENCE_SECONDS)
    old = [put(db, State.SENT, destination="mailto:ada@example.org") for _ in range(2)]
    for _ in range(17):
        put(db, State.SENT, destination="mailto:grace@example.org")
    page = get(site.vera, "/messages?destination=ada@example.org")
    assert ids_on(page) == old[::-1]
    assert "Searched" not in page.words
    assert ("div", {"id": "found"}) in page.elements, "the page was fetched repeatedly"
    assert (
        ids_on(Page(site.vera.get("/messages?destination=ada@example.org", headers={"X-Pgoutbox-Live": "1"}).text))
        == []
    )


def test_a_search_by_time_begins_at_that_time(
    site: Site, db: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reads, "SEARCH_ROWS", 5)
    old = [put(db, State.SENT) for _ in range(3)]
    db.execute("UPDATE pgoutbox.message SET created_at = now() - interval '9 days'")
    for _ in range(20):
        put(db, State.SENT)
    week_ago = (datetime.now(UTC) - timedelta(days=7)).strftime("%Y-%m-%dT%H:%M")
    page = get(site.vera, f"/messages?created_before={week_ago}")
    assert ids_on(page) == old[::-1]
    assert "Searched" not in page.words
    assert ids_on(get(site.vera, f"/messages?created_from={week_ago}&topic=nope")) == []


def test_an_id_leads_directly_to_its_message(site: Site, db: psycopg.Connection) -> None:
    message_id = put(db)
    answer = site.vera.get("/messages", params={"id": message_id})
    assert (answer.status_code, answer.headers["location"]) == (303, f"/messages/{message_id}")


def links_to_messages(page: Page) -> list[str]:
    """Return the links to lists of messages below the header, which has three."""
    return [href for href in page.values("a", "href") if href.startswith("/messages?")][3:]


def test_each_tab_counts_and_lists_the_messages_of_its_state(site: Site, db: psycopg.Connection) -> None:
    ids = {state.value: [put(db, state) for _ in range(number)] for number, state in enumerate(State, start=2)}
    later = ids["pending"].pop()
    db.execute(
        "UPDATE pgoutbox.message SET available_at = now() + interval '1 day', attempt_count = 1, lane = 1"
        " WHERE id = %s",
        [later],
    )
    due, sending, failed = (ids.pop(state) for state in ("pending", "sending", "failed"))
    ids = {"due": due, "scheduled": [later], "retrying": [later], "in flight": sending, "failed": failed, **ids}
    page = get(site.vera, "/messages")
    tabs = " ".join(f"{name} {len(found)}" for name, found in ids.items())
    assert f"all 27 {tabs} " in page.words
    paths = links_to_messages(page)
    assert paths[0] == "/messages?"
    assert [ids_on(get(site.vera, path)) for path in paths[1:9]] == [found[::-1] for found in ids.values()]


def test_a_tab_keeps_the_other_filters_and_counts_nothing_with_them(site: Site, db: psycopg.Connection) -> None:
    wanted = put(db, State.FAILED, topic="sms")
    put(db, State.FAILED)
    page = get(site.vera, "/messages?topic=sms&state=sent&limit=20")
    assert "all due scheduled retrying in flight failed sent skipped cancelled" in page.words
    (path,) = [href for href in links_to_messages(page) if "state=failed" in href]
    assert path == "/messages?state=failed&topic=sms&limit=20"
    assert ids_on(get(site.vera, path)) == [wanted]
    assert "cancelled pending, sending" in get(site.vera, "/messages?state=pending&state=sending&topic=sms").words


def test_the_page_of_failures_leads_to_messages_that_are_tried_again(site: Site, db: psycopg.Connection) -> None:
    """A new fault is seen there before the first message has used up its attempts."""
    retrying, _ = put(db), put(db)
    assert "retrying" not in get(site.vera, "/failed").words
    db.execute("UPDATE pgoutbox.message SET attempt_count = 1, lane = 1 WHERE id = %s", [retrying])
    site.dashboard.forget()
    page = get(site.vera, "/failed")
    assert "Messages that failed an attempt and are tried again: 1 retrying" in page.words
    (path,) = [href for href in page.values("a", "href") if "due=again" in href]
    assert ids_on(get(site.vera, path)) == [retrying]


def test_each_page_names_its_deployment(dsn: str, open_site: Callable[..., Site]) -> None:
    words = get(open_site(dsn, deployment="staging").vera, "/queues").words
    assert words.startswith("Queues · pgoutbox staging ")


def test_the_counts_of_due_messages_are_bounded(
    site: Site, db: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reads, "CAP", 5)
    ids = [put(db) for _ in range(10)]
    db.execute("UPDATE pgoutbox.message SET available_at = now() + interval '1 day' WHERE id = ANY (%s)", [ids[:8]])
    words = get(site.vera, "/messages").words
    assert "all 5+ due 2 scheduled 5+ retrying 0 " in words


def test_the_list_says_why_messages_wait(site: Site, db: psycopg.Connection) -> None:
    put(db)
    put(db, queue="bulk")
    put(db, State.SENT)
    db.execute("INSERT INTO pgoutbox.queue (name, paused_at) VALUES ('bulk', now())")
    page = get(site.vera, "/messages")
    assert page.words.count("pending, waits: ") == 2
    assert "pending, waits: paused mail bulk 0/4 just now just now" in page.words
    assert "pending, waits: no worker mail default" in page.words
    assert "Waits: its queue or its topic is paused" in page.values("span", "title")


def test_a_message_links_to_the_messages_with_the_same_values(site: Site, db: psycopg.Connection) -> None:
    given = {"destination": "mailto:ada@example.org", "coalesce_key": "c 1", "dedupe_key": "d", "ordering_key": None}
    message_id = put(db, **given)  # type: ignore[arg-type]
    db.execute("UPDATE pgoutbox.message SET owner = 'user-7'")
    ordered = put(db, ordering_key="o")
    long_one = put(db, dedupe_key="k" * 501)
    put(db, topic="sms", queue="bulk")
    for shown, count in ((message_id, 6), (ordered, 3), (long_one, 2)):
        page = get(site.ada, f"/messages/{shown}")
        paths = links_to_messages(page)
        assert len(paths) == count
        for path in paths:
            found = ids_on(get(site.ada, path))
            assert shown in found
            assert len(found) == (3 if path in ("/messages?topic=mail", "/messages?queue=default") else 1), path
        assert set(page.values("button", "data-copies")) <= {i for _, a in page.elements if (i := a.get("id"))}


def test_the_attempts_of_a_message_include_the_one_that_runs_or_sent_it(site: Site, db: psycopg.Connection) -> None:
    sent, sending, pending = put(db, State.SENT), put(db), put(db)
    for message_id in (sent, sending, pending):
        db.execute(ADD_ATTEMPT, [message_id, 2])
    db.execute("UPDATE pgoutbox.message SET attempt_count = 2, lane = 1 WHERE id IN (%s, %s)", [sending, pending])
    db.execute(PUT_SENDING, [sending])
    db.execute("UPDATE pgoutbox.message SET attempt_count = 3 WHERE id = %s", [sending])
    earlier = r"retry Attempt 2 ended .* busy 1 earlier attempt is not recorded Enqueued"
    for message_id, told in (
        (sent, r"sent Attempt 3 ended .* by w"),
        (sending, r"sending Attempt 3 started .* by w"),
        (pending, r"Next attempt"),
    ):
        words = get(site.vera, f"/messages/{message_id}").words
        assert re.search(rf"Attempts {told} .*{earlier}", words), words


def test_a_message_is_shown_with_its_history(site: Site, db: psycopg.Connection) -> None:
    message_id = put(db, State.FAILED, destination="mailto:ada@example.org", dedupe_key="once-7")
    db.execute(ADD_ATTEMPT, [message_id, 1])
    db.execute("UPDATE pgoutbox.message SET headers = %s WHERE id = %s", [Jsonb({"trace": "7"}), message_id])
    Operator(db, actor="grace", origin="cli").redrive(message_id)
    Operator(db, actor="grace", origin="cli").cancel(message_id)
    page = get(site.ada, f"/messages/{message_id}")
    for told in (
        "cancelled",
        "grace",
        "mailto:ada@example.org",
        "once-7",
        "trace 7",
        '"to": "ada"',
        "no such mailbox",
        "retry Attempt 1",
        "busy",
        "cli redrive",
        "cli cancel",
        f"SELECT * FROM pgoutbox.message WHERE id = {message_id};",
    ):
        assert told in page.words, told


def test_a_message_is_shown_with_its_times_and_flags(site: Site, db: psycopg.Connection) -> None:
    plain, other = put(db), put(db, ordering_key="k")
    db.execute("UPDATE pgoutbox.message SET halts_key = true, expires_at = '2126-01-31 09:00Z' WHERE id = %s", [other])
    words = get(site.vera, f"/messages/{other}").words
    assert re.search(r"Expires in .{1,20} 2126-01-31 09:00:00 UTC", words)
    assert "Halts key yes" in words
    words = get(site.vera, f"/messages/{plain}").words
    assert [name in words for name in ("Expires", "Halts key", "Created", "Finished")] == [False] * 4


def test_attempts_that_a_snooze_gave_back_do_not_count(site: Site, db: psycopg.Connection) -> None:
    message_id = put(db, State.PENDING)
    db.execute("UPDATE pgoutbox.message SET attempt_count = 9, lane = 1, max_attempts = 10, attempt_budget = 2")
    for path, told in ((f"/messages/{message_id}", "1 of 2"), ("/messages", "1/2")):
        words = get(site.vera, path).words
        assert told in words
        assert not re.search(r"9( of |/)10", words)


def test_supersession_is_shown_in_both_directions(site: Site, db: psycopg.Connection) -> None:
    older = put(db, coalesce_key="k")
    newer = put(db, coalesce_key="k")
    db.execute(
        """
        UPDATE pgoutbox.message
        SET state = 'skipped', skip_reason = 'superseded', superseded_by = %s, finished_at = now()
        WHERE id = %s
        """,
        [newer, older],
    )
    assert f"Superseded by message {newer}" in get(site.vera, f"/messages/{older}").words
    assert f"Supersedes message {older}" in get(site.vera, f"/messages/{newer}").words


def test_errors_that_differ_only_in_numbers_and_addresses_are_one_group(site: Site, db: psycopg.Connection) -> None:
    for number in range(3):
        fail_with(db, f"user {number} is unknown")
    fail_with(db, "user 1 is unknown", topic="sms")
    fail_with(db, "HTTP 503 after 7 s")
    fail_with(db, "HTTP 503 after 12 s")
    fail_with(db, "HTTP 404 after 12 s")
    for name in ("ada", "grace"):
        fail_with(db, f"RCPT {name}@club.org: 550 <{name}@club.org>: no such user")
    words = get(site.vera, "/failed").words
    for told in (
        "mail 3 messages of this group 3 up from 0 user # is unknown",
        "sms 1 message of this group 1 up from 0 user # is unknown",
        "mail 2 messages of this group 2 up from 0 HTTP 503 after # s",
        "mail 1 message of this group 1 up from 0 HTTP 404 after # s",
        "mail 2 messages of this group 2 up from 0 RCPT (address): 550 <(address)>: no such user",
    ):
        assert told in words, told


def test_a_group_links_to_its_messages(site: Site, db: psycopg.Connection) -> None:
    ids = [fail_with(db, f"user {number} is unknown") for number in range(3)]
    fail_with(db, "other")
    (path, _) = [href for href in get(site.vera, "/failed").values("a", "href") if "group=" in href]
    assert ids_on(get(site.vera, path)) == ids[::-1]


def test_the_preview_of_a_group_names_its_cause(site: Site, db: psycopg.Connection) -> None:
    for number in range(3):
        fail_with(db, f"user {number} is unknown")
    (path,) = [href for href in get(site.ada, "/failed").values("a", "href") if "do=dismiss" in href]
    assert "Cause: user # is unknown" in get(site.ada, path).words


def test_the_audit_is_filtered_and_paged(site: Site, db: psycopg.Connection) -> None:
    for hours, name in enumerate(("ada", "grace", "ada", "ada"), start=1):
        Operator(db, actor=name).pause(f"queue-of-{name}", duration=timedelta(hours=hours))
    Operator(db).resume("queue-of-ada")
    page = get(site.vera, "/audit?limit=2")
    assert "resume queue queue-of-ada" in page.words
    (following,) = [href for href in page.values("a", "href") if "before=" in href]
    assert "grace" in get(site.vera, following).words
    assert "grace" not in get(site.vera, "/audit?actor=ada").words
    assert "pause queue" not in get(site.vera, "/audit?action=resume").words


# --- redaction and escaping -------------------------------------------------------------------------------------------


@pytest.fixture
def hostile(db: psycopg.Connection) -> int:
    """Create a message that attacks its viewers with each of its texts."""
    message_id = put(db, State.FAILED, destination=HOSTILE_DESTINATION, coalesce_key=HOSTILE, dedupe_key=HOSTILE)
    db.execute(
        "UPDATE pgoutbox.message SET payload = %s, headers = %s, last_error = %s, worker = %s WHERE id = %s",
        [Jsonb({HOSTILE: [HOSTILE]}), Jsonb({HOSTILE: HOSTILE}), HOSTILE, HOSTILE, message_id],
    )
    db.execute(
        """
        UPDATE pgoutbox.message
        SET attempts = jsonb_build_array((1, 1, 'retry', %s, now(), now(), %s, NULL, NULL, NULL)::pgoutbox.attempt)
        WHERE id = %s
        """,
        [HOSTILE, HOSTILE, message_id],
    )
    held, written = put(db, State.SENDING), put(db)
    db.execute("UPDATE pgoutbox.message SET worker = %s WHERE id = %s", [HOSTILE, held])
    db.execute("UPDATE pgoutbox.message SET topic = %s, queue = %s WHERE id = %s", [HOSTILE, HOSTILE, written])
    db.execute("UPDATE pgoutbox.message SET topic = %s, queue = 'a/b' WHERE id = %s", [HOSTILE, held])
    db.execute(
        """
        INSERT INTO pgoutbox.breaker (key, retry_at, cooldown_seconds, worker, last_error)
        VALUES (%s, now(), 30, %s, %s)
        """,
        [HOSTILE, HOSTILE, HOSTILE],
    )
    Operator(db, actor=HOSTILE, origin=HOSTILE).act_on_all("redrive", MessageFilter(text=HOSTILE[:20]))
    db.execute("UPDATE pgoutbox.audit SET details = %s", [Jsonb({HOSTILE: HOSTILE})])
    db.execute(
        "UPDATE pgoutbox.message SET state = 'failed', finished_at = now(), last_error = %s WHERE id = %s",
        [HOSTILE, message_id],
    )
    return message_id


def test_hostile_texts_are_inert_on_every_page(site: Site, hostile: int) -> None:
    query = urlencode({"text": HOSTILE, "topic": HOSTILE, "destination": HOSTILE_DESTINATION, "key": HOSTILE})
    paths = [
        "/",
        "/messages",
        f"/messages?{query}",
        f"/messages/{hostile}",
        "/queues",
        "/workers",
        "/breakers",
        "/schedules",
    ]
    paths += ["/failed", "/audit"]
    paths += [
        f"/audit?{urlencode({'actor': HOSTILE})}",
        f"/bulk?do=redrive&{urlencode({'text': HOSTILE[:20]})}",
    ]
    paths += [href for href in get(site.ada, "/failed").values("a", "href") if "group=" in href]
    shown = 0
    for path in paths:
        answer = site.ada.get(path)
        assert answer.status_code == 200, path
        page = Page(answer.text)
        assert page.values("script", "src") == ["/static/pgoutbox.js"], path
        assert [tag for tag, _ in page.elements].count("script") == 1, path
        assert not {"img", "b", "iframe", "object", "style"} & {tag for tag, _ in page.elements}, path
        names = {name for _, attributes in page.elements for name in attributes}
        assert not {name for name in names if name.startswith("on") or name == "style"}, path
        links = [*page.values("a", "href"), *page.values("form", "action"), *page.values("link", "href")]
        assert all(link.startswith(("/", "#")) for link in links), path
        assert not set("\u2028\u202e") & set(answer.text), path
        shown += "<script>alert(1)</script>" in page.text
    assert shown >= 9, "the hostile text is missing"


def test_secrets_are_hidden_as_on_the_command_line(
    dsn: str, open_site: Callable[..., Site], db: psycopg.Connection
) -> None:
    outbox = Outbox(load_settings(dsn=dsn))
    outbox.define(Topic("mail", redact=("iban",)))
    site = open_site(dsn, outbox, redact="badge")
    message_id = put(db, State.FAILED, destination=f"https://a:{CANARY}@example.org/?token={CANARY}")
    db.execute(
        "UPDATE pgoutbox.message SET payload = %s, headers = %s, last_error = %s WHERE id = %s",
        [
            Jsonb({"password": CANARY, "iban": CANARY, "badge": CANARY, "to": "ann"}),
            Jsonb({"Authorization": f"Bearer {CANARY}"}),
            f"refused: password={CANARY} iban={CANARY}",
            message_id,
        ],
    )
    db.execute(ADD_ATTEMPT, [message_id, 1])
    db.execute(SET_LAST_ERROR, (f"badge={CANARY}", [message_id]))
    Operator(db, actor="ada").pause("bulk")
    db.execute("UPDATE pgoutbox.audit SET details = %s", [Jsonb({"text": f"password={CANARY}"})])
    paths = ["/", "/messages", f"/messages/{message_id}", "/failed", "/audit", "/bulk?do=redrive"]
    for path in paths:
        assert CANARY not in site.ada.get(path).text, path
    for path in (f"/messages/{message_id}", "/failed", "/audit"):
        assert "(redacted)" in get(site.ada, path).text, path


def test_an_encrypted_payload_is_labelled(dsn: str, open_site: Callable[..., Site], db: psycopg.Connection) -> None:
    outbox = Outbox(load_settings(dsn=dsn, encryption_keys=Fernet.generate_key().decode()))
    outbox.define(Topic("sealed", encrypted=True))
    with db.transaction():
        message_id = outbox.on(db).enqueue("sealed", {"code": CANARY}).id
    page = get(open_site(dsn, outbox).ada, f"/messages/{message_id}")
    assert "(encrypted)" in page.text
    assert CANARY not in page.text


# --- acts -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "act", "becomes", "told"),
    [
        (State.FAILED, "redrive", "pending", "is pending again"),
        (State.CANCELLED, "redrive", "pending", "is pending again"),
        (State.PENDING, "cancel", "cancelled", "is cancelled"),
        (State.SENDING, "cancel", "sending", "is asked to stop"),
    ],
)
def test_an_operator_acts_on_a_message(
    site: Site, db: psycopg.Connection, state: State, act: str, becomes: str, told: str
) -> None:
    message_id = put(db, state)
    assert f"/messages/{message_id}/{act}" in get(site.ada, f"/messages/{message_id}").values("form", "action")
    answer = site.ada.post(f"/messages/{message_id}/{act}", follow_redirects=True)
    assert (answer.status_code, answer.history[0].status_code) == (200, 303)
    assert told in Page(answer.text).words
    assert state_of(db, message_id) == becomes
    assert audit_of(db) == [("ada", "web 127.0.0.1", act, None, [message_id], None)]


def test_a_resend_redirects_to_the_copy(site: Site, db: psycopg.Connection) -> None:
    message_id = put(db, State.SENT)
    answer = site.ada.post(f"/messages/{message_id}/resend", follow_redirects=True)
    page = Page(answer.text)
    assert f"Copy of message {message_id}" in page.words
    ((_, origin, action, _, ids, details),) = audit_of(db)
    assert (origin, action, ids) == ("web 127.0.0.1", "resend", [message_id])
    assert isinstance(details, dict)
    assert state_of(db, details["copy"]) == "pending"


FORBIDDEN: Final = [
    (State.SENT, "redrive", "is sent; only failed and cancelled messages can be redriven"),
    (State.PENDING, "redrive", "is pending"),
    (State.SENDING, "redrive", "is sending"),
    (State.SKIPPED, "redrive", "is skipped"),
    (State.FAILED, "resend", "is failed; only sent messages can be resent"),
    (State.PENDING, "resend", "is pending"),
    (State.SENT, "cancel", "is already sent"),
    (State.FAILED, "cancel", "is already failed"),
    (State.CANCELLED, "cancel", "is already cancelled"),
    (State.SENDING, "reschedule", "is sending; only pending messages can be rescheduled"),
    (State.PENDING, "dismiss", "is pending; only failed messages can be dismissed"),
]


def test_an_act_that_the_state_forbids_is_refused_with_the_reason(site: Site, db: psycopg.Connection) -> None:
    for state, act, reason in FORBIDDEN:
        message_id = put(db, state)
        answer = site.ada.post(f"/messages/{message_id}/{act}", data={"reason": "spam"})
        assert answer.status_code == 409, (state, act)
        assert reason in Page(answer.text).words
        assert (state_of(db, message_id), audit_of(db)) == (state, [])


def test_a_failed_message_is_sent_to_a_corrected_destination(site: Site, db: psycopg.Connection) -> None:
    message_id = put(db, State.FAILED, destination="mailto:ada@exmaple.org")
    answer = site.ada.post(
        f"/messages/{message_id}/correct", data={"destination": "mailto:ada@example.org"}, follow_redirects=True
    )
    page = Page(answer.text)
    assert "The message is corrected, and pending." in page.words
    assert "Destination mailto:ada@example.org" in page.words
    refused = site.ada.post(f"/messages/{put(db, State.FAILED)}/correct", data={"destination": "ada"})
    assert (refused.status_code, "destination: must be a URI" in Page(refused.text).words) == (422, True)


def test_the_content_of_a_fan_out_is_shown_to_operators(site: Site, db: psycopg.Connection, dsn: str) -> None:
    with db.transaction():
        outbox = Outbox(load_settings(dsn=dsn))
        outbox.on(db).enqueue_fanout(
            "news", None, ["mailto:ada@example.org"], content={"html": "<p>", "password": CANARY}
        )
    ((message_id,),) = db.execute("SELECT m.id FROM pgoutbox.message AS m").fetchall()
    words = get(site.ada, f"/messages/{message_id}").words
    assert '"html": "<p>"' in words
    assert CANARY not in words
    assert "A viewer cannot read it." in get(site.vera, f"/messages/{message_id}").words


def test_the_payload_is_corrected_by_who_may_read_it(dsn: str, db: psycopg.Connection, shop: Site) -> None:
    """An empty field stays, and the model of the topic checks the payload."""
    message_id = put(db, State.FAILED, topic="mail.welcome", destination="mailto:ada@example.org")
    path = f"/messages/{message_id}"
    assert {"payload", "headers"} <= fields_of(get(shop.ada, path))
    form = {"payload": '{"user_id": 0, "email": "ada@example.org", "to": null}'}
    refused = shop.ada.post(f"{path}/correct", data=form)
    assert (refused.status_code, "payload.user_id: does not fit Welcome" in Page(refused.text).words) == (422, True)
    for form in ({}, {"payload": "ada"}):
        assert shop.ada.post(f"{path}/correct", data=form).status_code == 422
    assert state_of(db, message_id) == "failed"
    form = {"payload": '{"user_id": 7, "email": "ada@example.org", "to": null}', "queue": "critical", "owner": " "}
    page = Page(shop.ada.post(f"{path}/correct", data=form, follow_redirects=True).text)
    assert "The message is corrected, and pending." in page.words
    row = db.execute("SELECT payload, queue, destination, owner, state FROM pgoutbox.message").fetchone()
    corrected = {"user_id": 7, "email": "ada@example.org"}
    assert row == (corrected, "critical", "mailto:ada@example.org", None, "pending")


def test_an_operator_who_may_not_read_payloads_gets_no_field_for_them(
    dsn: str, db: psycopg.Connection, open_site: Callable[..., Site]
) -> None:
    message_id = put(db, State.FAILED)
    with login(dsn, "pgoutbox_operator") as its_dsn:
        site = open_site(its_dsn)
        fields = fields_of(get(site.ada, f"/messages/{message_id}"))
        assert ("destination" in fields, "payload" in fields) == (True, False)
        refused = site.ada.post(f"/messages/{message_id}/correct", data={"payload": '{"to": "eve"}'})
        assert refused.status_code in (403, 409), refused.text
    assert state_of(db, message_id) == "failed"


def test_a_message_in_flight_is_put_back(site: Site, db: psycopg.Connection) -> None:
    message_id = put(db, State.SENDING)
    path = f"/messages/{message_id}/release"
    assert path in get(site.ada, f"/messages/{message_id}").values("form", "action")
    page = Page(site.ada.post(path, follow_redirects=True).text)
    assert "The message is taken from its worker, and tried again when the lease ends." in page.words
    ((_, _, action, _, ids, _),) = audit_of(db)
    assert (action, ids) == ("release", [message_id])


def test_a_message_tells_why_it_waits_until_when_and_where_that_ends(site: Site, db: psycopg.Connection) -> None:
    message_id = put(db)
    page = get(site.ada, f"/messages/{message_id}")
    assert "Deliver now" not in page.words  # It is due, so the button would change nothing.
    db.execute(
        "INSERT INTO pgoutbox.queue (name, paused_at, resume_at) VALUES ('default', now(), now() + interval '2 h')"
    )
    page = get(site.ada, f"/messages/{message_id}")
    assert "Waits: its queue or its topic is paused (see the queue and the topic); until in 1 h." in page.words
    assert "/queues?queue=default" in page.values("a", "href")
    db.execute("UPDATE pgoutbox.message_live SET available_at = now() + interval '1 day'")
    assert "Deliver now" in get(site.ada, f"/messages/{message_id}").words


def test_every_page_has_the_totals_and_the_first_one_the_worst_finding(site: Site, db: psycopg.Connection) -> None:
    for state in (State.FAILED, State.FAILED, State.SENDING, State.PENDING):
        put(db, state)
    db.execute("UPDATE pgoutbox.message_live SET available_at = now() - interval '1 h' WHERE state = 'pending'")
    for path in ("/", "/messages", "/queues", "/topics", "/audit"):
        page = get(reloaded(site).vera, path)
        assert "1 problem 1 due 1 in flight 2 failed" in page.words
        assert "Failed 2" not in page.words, "the header has each number once"
    page = get(site.vera, "/")
    assert "Problems 1 message is not delivered: no worker is running." in page.words


def test_no_page_depends_on_the_totals(site: Site, db: psycopg.Connection, connect: Connect) -> None:
    holder = connect()
    holder.execute("LOCK TABLE pgoutbox.breaker")
    page = get(reloaded(site).ada, "/audit")
    assert "Operator acts" in page.words or "Audit" in page.words
    assert "in flight" not in page.words
    holder.rollback()
    assert "0 in flight" in get(reloaded(site).ada, "/audit").words


def test_the_form_for_another_time_needs_a_time(site: Site, db: psycopg.Connection) -> None:
    message_id = put(db)
    db.execute("UPDATE pgoutbox.message_live SET available_at = now() + interval '1 day'")
    refused = site.ada.post(f"/messages/{message_id}/reschedule", data={"available_at": ""})
    assert (refused.status_code, "available_at: must be given" in Page(refused.text).words) == (422, True)


@pytest.mark.parametrize(("act", "state"), [("snooze", State.SENDING), ("cancel", State.SENT)])
def test_a_refusal_does_not_depend_on_the_state_that_a_form_claims(
    site: Site, db: psycopg.Connection, act: str, state: State
) -> None:
    message_id = put(db, State.SENDING if act == "snooze" else State.PENDING)
    form = {"state": state.value, "duration": "1", "reason": "moves"}
    page = Page(site.ada.post(f"/messages/{message_id}/{act}", data=form, follow_redirects=True).text)
    told = {"snooze": "is sending; only pending messages can be snoozed", "cancel": "The message is cancelled."}
    assert told[act] in page.words


def test_a_pending_message_is_snoozed_for_a_reason(site: Site, db: psycopg.Connection) -> None:
    message_id = put(db)
    path = f"/messages/{message_id}/snooze"
    assert path in get(site.ada, f"/messages/{message_id}").values("form", "action")
    asked = {"duration": "2", "unit": "hours", "reason": "the mail server moves"}
    for field, told in (("duration", "duration: must be given"), ("reason", "reason: say why it has to wait")):
        refused = site.ada.post(path, data={name: value for name, value in asked.items() if name != field})
        assert (refused.status_code, told in Page(refused.text).words) == (422, True)
    page = Page(site.ada.post(path, data=asked, follow_redirects=True).text)
    assert "The message is not due before the end of this time." in page.words
    assert "the mail server moves" in page.words
    query = "SELECT available_at > now() + interval '119 min' FROM pgoutbox.message WHERE id = %s"
    assert db.execute(query, [message_id]).fetchone() == (True,)


def test_a_failed_message_is_dismissed_with_a_reason(site: Site, db: psycopg.Connection) -> None:
    message_id = put(db, State.FAILED)
    path = f"/messages/{message_id}/dismiss"
    assert path in get(site.ada, f"/messages/{message_id}").values("form", "action")
    refused = site.ada.post(path, data={"reason": " "})
    assert (refused.status_code, "reason: say why" in Page(refused.text).words) == (422, True)
    page = Page(site.ada.post(path, data={"reason": "mailbox closed"}, follow_redirects=True).text)
    assert "dismissed by ada: mailbox closed" in page.words
    ((_, _, action, _, ids, details),) = audit_of(db)
    assert (action, ids, details) == ("dismiss", [message_id], {"reason": "mailbox closed"})


@pytest.mark.parametrize("moment", ["", "2030-01-01T10:00:00"])
def test_a_pending_message_is_rescheduled(site: Site, db: psycopg.Connection, moment: str) -> None:
    message_id = put(db)
    db.execute("UPDATE pgoutbox.message_live SET available_at = now() + interval '1 day' WHERE state = 'pending'")
    path = f"/messages/{message_id}/reschedule"
    assert path in get(site.ada, f"/messages/{message_id}").values("form", "action")
    page = Page(site.ada.post(path, data={"available_at": moment} if moment else {}, follow_redirects=True).text)
    assert "The message is due at its new time." in page.words
    row = db.execute(
        "SELECT available_at = coalesce(nullif(%s, '')::timestamp AT TIME ZONE 'UTC', available_at), "
        "available_at <= now() FROM pgoutbox.message",
        [moment],
    ).fetchone()
    assert row == (True, not moment)


# --- topics -----------------------------------------------------------------------------------------------------------

WELCOME: Final = '{"user_id": 7, "email": "ada@example.org"}'


@pytest.fixture
def shop(dsn: str, open_site: Callable[..., Site]) -> Site:
    """Serve a dashboard that knows the topics of an application."""
    return open_site(dsn, topics_app.outbox)


def fields_of(page: Page) -> set[str]:
    """Return the names of the fields of the form."""
    names = {name for tag in ("input", "textarea", "select") for name in page.values(tag, "name")}
    return names - {"csrf_token", "topic"}


def test_the_topics_are_listed_with_their_messages(shop: Site, db: psycopg.Connection) -> None:
    for state in (State.PENDING, State.PENDING, State.SENDING, State.FAILED, State.SENT):
        put(db, state, topic="mail.welcome")
    put(db, topic="mail.stray")
    page = get(shop.ada, "/topics")
    for told in (
        "mail.welcome 2 waiting messages of mail.welcome 1 in flight message of mail.welcome 1 failed message",
        "critical async, on_unknown=hold, timeout 30 s",
        "search.index 0 0 0",
        "async batch of 500",
        "mail.stray 1 waiting message of mail.stray",
        "not in the application of this dashboard",
    ):
        assert told in page.words, told
    assert "/topics?topic=mail.welcome" in page.values("a", "href")


def test_a_topic_has_a_page_with_its_definition_and_failures(shop: Site, db: psycopg.Connection) -> None:
    message_id = put(db, State.FAILED, topic="mail.welcome")
    error = "KeyError: no such member"
    db.execute("UPDATE pgoutbox.message SET last_error = %s WHERE id = %s", (error, message_id))
    page = get(shop.ada, "/topics?topic=mail.welcome")
    for told in (
        "1 failed message of mail.welcome",
        "KeyError: no such member",
        "Queue critical",
        "Payload Welcome",
        "Computed destination, owner, dedupe key",
        "Attempts 4 after 60, 300 s",
        "Delay 5 min",
        "Expires after 1 h",
        "Redacts language",
    ):
        assert told in page.words, told
    assert "/enqueue?topic=mail.welcome" in page.values("a", "href")
    assert "/enqueue?topic=mail.welcome" not in get(shop.vera, "/topics?topic=mail.welcome").values("a", "href")
    assert "Encrypted yes" in get(shop.ada, "/topics?topic=mail.note").words
    unknown = get(shop.ada, "/topics?topic=mail.stray")
    assert "mail.stray 0 0 0" in unknown.words
    assert "This topic is not in the application" in unknown.words


def test_the_pages_of_topics_say_why_their_messages_wait(site: Site, db: psycopg.Connection) -> None:
    message_id = put(db, topic="mail.stray", queue="nobody")
    assert "no worker" in get(site.vera, "/topics").words
    page = get(site.vera, "/topics?topic=mail.stray")
    assert "The message that is due first waits: no running worker serves its queue" in page.words
    assert f"/messages/{message_id}" in page.values("a", "href")
    assert "/workers" in page.values("a", "href")


def test_an_operator_pauses_and_resumes_a_topic(site: Site, db: psycopg.Connection) -> None:
    message_id = put(db, topic="mail.digest")
    asked = {"duration": "90", "unit": "minutes"}
    page = Page(site.ada.post("/topics/mail.digest/pause", data=asked, follow_redirects=True).text)
    assert "The topic is paused in all queues." in page.words
    assert "resumes in 1 h" in page.words
    assert "resumes in 1 h" in get(site.vera, "/topics").words
    page = get(site.vera, f"/messages/{message_id}")
    assert "Waits: its queue or its topic is paused (see the queue and the topic); until in 1 h." in page.words
    assert "/topics?topic=mail.digest" in page.values("a", "href")
    assert site.vera.post("/topics/mail.digest/resume").status_code == 403
    page = Page(site.ada.post("/topics/mail.digest/resume", follow_redirects=True).text)
    assert "The topic is resumed." in page.words
    page = Page(site.ada.post("/topics/mail.digest/resume", follow_redirects=True).text)
    assert "The topic was not paused." in page.words
    assert site.ada.post("/topics/No%20Topic/pause").status_code == 422
    acts = db.execute(
        "SELECT a.actor, a.action, a.details ->> 'topic' FROM pgoutbox.audit AS a ORDER BY a.id"
    ).fetchall()
    assert acts == [("ada", "pause", "mail.digest"), ("ada", "resume", "mail.digest")]


def test_a_paused_topic_is_resumed_from_the_first_screen(site: Site, db: psycopg.Connection) -> None:
    put(db, topic="mail.digest")
    db.execute("UPDATE pgoutbox.message_live SET available_at = now() - interval '1 h'")
    Operator(db).pause_topic("mail.digest")
    (form,) = [form for form in get(site.ada, "/").forms if "/topics/" in form.action]
    assert form.action == "/topics/mail.digest/resume"
    assert "Cancel…" not in get(site.ada, "/").words
    assert "of paused topics" in get(site.ada, "/").words
    page = Page(site.ada.post(form.action, data=form.fields, follow_redirects=True).text)
    assert "The topic is resumed." in page.words
    assert "of paused topics" not in get(site.ada, "/").words, "no finding from before the act is shown after it"


def test_the_pages_of_topics_have_the_rate_and_the_times_of_sent_messages(site: Site, db: psycopg.Connection) -> None:
    for seconds in range(1, 101):
        put(db, State.SENT, topic="mail.welcome")
        db.execute(
            "UPDATE pgoutbox.message SET attempt_count = 1, finished_at = now() - interval '1 s',"
            " claimed_at = now() - interval '1 s' - %(seconds)s * interval '1 s',"
            " available_at = now() - interval '1 s' - %(seconds)s * interval '3 s'"
            " WHERE id = (SELECT max(id) FROM pgoutbox.message)",
            {"seconds": seconds},
        )
    found = get(site.vera, "/topics").words
    assert "20 per min 1 min 3 min 50 s 1 min" in found, found


def test_a_topic_in_need_is_not_hidden_by_many_whose_messages_were_sent(site: Site, db: psycopg.Connection) -> None:
    db.execute(
        "INSERT INTO pgoutbox.message (topic, payload, state, attempt_count, worker, claimed_at, finished_at)"
        " SELECT format('fine-%s', n), '{}', 'sent', 1, 'w', now(), now() FROM generate_series(1, 150) AS n"
    )
    put(db, topic="z.due")
    put(db, State.FAILED, topic="z.failed")
    page = get(site.vera, "/topics")
    assert "Shows 60 of 152 topics" in page.words
    assert [href for href in page.values("a", "href") if "?topic=z." in href and href.startswith("/topics")] == [
        "/topics?topic=z.due",
        "/topics?topic=z.failed",
    ]


def test_a_released_message_does_not_hide_the_error_of_a_topic(site: Site, db: psycopg.Connection) -> None:
    fail_with(db, "KeyError: vat")
    db.execute(
        "UPDATE pgoutbox.message SET attempt_count = 1, max_attempts = 12, lane = 1 WHERE id = %s",
        [put(db)],
    )
    assert "KeyError: vat" in get(site.vera, "/topics").words
    retried, released = put(db, topic="again"), put(db, topic="again")
    db.execute(
        "UPDATE pgoutbox.message SET attempt_count = 1, lane = 1, last_error = 'TimeoutError: shop' WHERE id = %s",
        [retried],
    )
    db.execute("UPDATE pgoutbox.message SET attempt_count = 1, max_attempts = 12, lane = 1 WHERE id = %s", [released])
    site.dashboard.forget()
    assert "TimeoutError: shop" in get(site.vera, "/topics?topic=again").words


def test_the_page_of_a_topic_says_if_it_does_not_show_all_failures(
    site: Site, db: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(21):
        fail_with(db, f"no{'x' * number}")
    assert "20 groups at most, of the newest 1,000 failures;" in get(site.vera, "/topics?topic=mail").words
    monkeypatch.setattr(reads, "CAP", 5)
    site.dashboard.forget()
    assert "failures of all topics;" in get(site.vera, "/topics?topic=mail").words
    db.execute("DELETE FROM pgoutbox.message WHERE id > 3")
    monkeypatch.undo()
    site.dashboard.forget()
    page = get(site.vera, "/topics?topic=mail")
    assert "mail 0 0 3 failed" in page.words
    assert "at most" not in page.words


def test_topics_and_queues_have_numbers_only_where_they_hold(site: Site, db: psycopg.Connection) -> None:
    put(db, topic="a", queue="one")
    for _ in range(2):
        put(db, topic="b", queue="two")
    for state in ("state=pending", "state=pending&due=now"):
        assert "Topic b 2 a 1 Queue two 2 one 1" in get(site.vera, f"/messages?{state}").words
        assert "Topic b 2 a 1 Queue two one Text" in get(site.vera, f"/messages?{state}&topic=a").words
        assert "Topic b a Queue two one Text" in get(site.vera, f"/messages?{state}&text=x").words


def test_a_queue_with_expired_leases_can_be_chosen(site: Site, db: psycopg.Connection) -> None:
    put(db, State.SENDING, queue="one")
    put(db, State.SENDING, queue="lapsed")
    db.execute("UPDATE pgoutbox.claim SET lease_expires_at = now() - interval '1 h' WHERE queue = 'lapsed'")
    assert "Queue lapsed 1 one 1" in get(site.vera, "/messages?state=sending").words


@pytest.mark.parametrize("what", ["/topics", "/messages?state=pending"])
def test_many_messages_of_one_queue_hide_no_topic_of_another(
    site: Site, db: psycopg.Connection, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """The page once counted the newest messages of all, so a topic with the oldest had none."""
    monkeypatch.setitem(reads.EACH_QUEUE, "rows", 2)
    put(db, topic="mail.oldest", queue="other")
    for _ in range(30):
        put(db, topic="mail.digest")
    words = get(site.vera, what).words
    assert re.search(r"mail\.oldest 1\+", words)
    assert re.search(r"mail\.digest 10\+", words)


def test_of_many_topics_those_with_messages_come_first_and_the_others_are_found_by_name(
    dsn: str, open_site: Callable[..., Site], db: psycopg.Connection
) -> None:
    outbox = Outbox(load_settings(dsn=dsn))
    for number in range(150):
        outbox.define(Topic(f"mail.{number:03}"))
        if number != 120:
            outbox.handler(f"mail.{number:03}")(lambda message, context: None)
    put(db, topic="mail.140")
    put(db, State.FAILED, topic="zoo")
    site = open_site(dsn, outbox)
    page = get(site.ada, "/topics")
    assert "Shows 60 of 151 topics" in page.words
    shown = [href.rpartition("=")[2] for href in page.values("a", "href") if href.startswith("/topics?topic=")]
    assert shown[:4] == ["zoo", "mail.140", "mail.120", "mail.000"]
    assert "zoo 0 0 1 failed" in page.words
    page = get(site.ada, "/topics?start=mail.14")
    assert "Shows" not in page.words
    assert len([href for href in page.values("a", "href") if href.startswith("/topics?topic=")]) == 10
    assert "No topic begins with this." in get(site.ada, "/topics?start=ail").words


def test_without_an_outbox_the_page_says_how_to_give_one(site: Site, db: psycopg.Connection) -> None:
    put(db, topic="mail.welcome")
    for path in ("/topics", "/enqueue", "/enqueue?topic=mail.welcome"):
        page = get(site.ada, path)
        assert "Start it with pgoutbox web --app MODULE:ATTRIBUTE" in page.words
        assert "/enqueue" not in page.values("form", "action")
    assert "mail.welcome 1 waiting" in get(site.ada, "/topics").words
    refused = site.ada.post("/enqueue", data={"topic": "mail.welcome", "payload": WELCOME})
    assert (refused.status_code, "pgoutbox web --app" in Page(refused.text).words) == (409, True)


def test_the_form_offers_the_options_that_the_topic_leaves_open(shop: Site) -> None:
    assert fields_of(get(shop.ada, "/enqueue?topic=mail.welcome")) == {
        "payload",
        "coalesce_key",
        "ordering_key",
        "fair_key",
    }
    assert fields_of(get(shop.ada, "/enqueue?topic=mail.loose")) == {
        "payload", "destination", "owner", "dedupe_key", "fair_key", "delay", "unit",
    }  # fmt: skip
    text = shop.ada.get("/enqueue?topic=mail.welcome").text
    assert "&#34;email&#34;: &#34;ada@example.org&#34;" in text
    assert "&#34;user_id&#34;: 1" in text
    unknown = get(shop.ada, "/enqueue?topic=mail.welcom", 404)
    assert "topic 'mail.welcom' is neither defined nor handled by the application; did you mean" in unknown.words


def test_the_form_for_a_correction_is_hidden_without_the_right(dsn: str, open_site: Callable[..., Site]) -> None:
    with psycopg.connect(dsn, autocommit=True) as owner, login(dsn, "pgoutbox_operator") as its_dsn:
        message_id = put(owner, State.FAILED, destination="mailto:ada@example.org")
        site = open_site(its_dsn)
        assert "Correct and redrive" in get(site.ada, f"/messages/{message_id}").words
        owner.execute("REVOKE EXECUTE ON FUNCTION pgoutbox.correct FROM pgoutbox_operator")
        assert "Correct and redrive" not in get(site.ada, f"/messages/{message_id}").words
        refused = site.ada.post(f"/messages/{message_id}/correct", data={"destination": "mailto:eve@example.org"})
        assert refused.status_code in (403, 409), refused.text
        owner.execute("GRANT EXECUTE ON FUNCTION pgoutbox.correct TO pgoutbox_operator")


def test_an_operator_enqueues_by_the_definition_of_the_topic(shop: Site, db: psycopg.Connection) -> None:
    form = {"topic": "mail.welcome", "payload": WELCOME}
    answer = shop.ada.post("/enqueue", data=form, follow_redirects=True)
    page = Page(answer.text)
    assert "The message is enqueued." in page.words
    assert "Destination mailto:ada@example.org" in page.words
    assert "Owner user-7" in page.words
    ((message_id, queue, attempts, key),) = db.execute(
        "SELECT id, queue, max_attempts, dedupe_key FROM pgoutbox.message"
    ).fetchall()
    assert (queue, attempts, key) == ("critical", 4, "welcome-7")
    ((digest,),) = db.execute("SELECT pgoutbox.destination_digest('mailto:ada@example.org')").fetchall()
    details = {"topic": "mail.welcome", "new_destination_digest": digest}
    assert audit_of(db) == [("ada", "web 127.0.0.1", "enqueue", None, [message_id], details)]
    again = Page(shop.ada.post("/enqueue", data=form, follow_redirects=True).text)
    assert "No message was enqueued: this message has the dedupe key already." in again.words
    assert len(audit_of(db)) == 1


def test_the_options_of_the_form_are_stored(shop: Site, db: psycopg.Connection) -> None:
    options = {"destination": "tel:1", "owner": "o", "coalesce_key": "c", "dedupe_key": "d"}
    form = {"topic": "search.index", "payload": "[1]", **options, "delay": "2", "unit": "hours"}
    assert shop.ada.post("/enqueue", data=form).status_code == 303
    row = db.execute(
        "SELECT payload, destination, owner, coalesce_key, dedupe_key, available_at - created_at FROM pgoutbox.message"
    ).fetchone()
    assert row == ([1], "tel:1", "o", "c", "d", timedelta(hours=2))


def test_a_delay_without_a_unit_is_in_seconds_and_a_pause_in_minutes(shop: Site, db: psycopg.Connection) -> None:
    assert shop.ada.post("/enqueue", data={"topic": "search.index", "payload": "[1]", "delay": "5"}).status_code == 303
    delays = db.execute("SELECT available_at - created_at FROM pgoutbox.message").fetchall()
    assert delays == [(timedelta(seconds=5),)]
    assert shop.ada.post("/queues/bulk/pause", data={"duration": "5"}).status_code == 303
    assert pauses_of(db) == [timedelta(minutes=5)]


def test_a_pause_has_as_many_seconds_as_its_field_has_digits(site: Site, db: psycopg.Connection) -> None:
    form = {"duration": "999999", "unit": "seconds"}
    assert site.ada.post("/queues/bulk/pause", data=form).status_code == 303
    assert pauses_of(db) == [timedelta(seconds=999_999)]


def pauses_of(db: psycopg.Connection) -> list[timedelta]:
    """Return the lengths of the pauses of queues."""
    return [length for (length,) in db.execute("SELECT resume_at - paused_at FROM pgoutbox.queue")]


FORM_ERRORS: Final[list[tuple[str, dict[str, str], str | None, str]]] = [
    ("mail.welcome", {"payload": '{"user_id": 7}'}, "payload", "payload.email: does not fit Welcome"),
    ("mail.welcome", {"payload": '{"user_id": 7,}'}, "payload", "payload: not JSON at line 1, column 15"),
    ("mail.welcome", {"payload": ""}, "payload", "payload: not JSON at line 1"),
    ("mail.loose", {"payload": "{}"}, "payload", "mail.loose' fails for it: KeyError"),
    ("search.index", {"payload": "1", "destination": "<ada>"}, "destination", "destination: must be a URI"),
    ("search.index", {"payload": "1", "delay": "soon"}, "delay", "delay: give a whole number"),
    ("search.index", {"payload": "1", "delay": "900000", "unit": "days"}, "delay", "delay: at most 3650 days"),
    ("search.index", {"payload": "1", "unit": "years"}, None, "unit: give one of seconds, minutes"),
    (
        "search.index",
        {"payload": "1", "coalesce_key": "a", "ordering_key": "b"},
        "ordering_key",
        "ordering_key: give ordering_key or coalesce_key, not both",
    ),
    ("mail.note", {"payload": '{"lines": [], "name": null}'}, None, "set PGOUTBOX_ENCRYPTION_KEYS"),
    ("mail.welcome", {"payload": WELCOME, "owner": "eve"}, None, "owner: belongs to the definition"),
]


def test_an_error_of_the_form_keeps_the_input(shop: Site, db: psycopg.Connection) -> None:
    for topic, fields, field, told in FORM_ERRORS:
        answer = shop.ada.post("/enqueue", data={"topic": topic, **fields})
        page = Page(answer.text)
        assert answer.status_code == 422, fields
        assert told in page.words
        marked = [attributes for _, attributes in page.elements if "aria-invalid" in attributes]
        assert [(one["name"], one["aria-describedby"]) for one in marked] == ([(field, "error")] if field else [])
        kept = {
            name: value for name, value in fields.items() if name in fields_of(page) and name not in ("payload", "unit")
        }
        assert kept.items() <= {a["name"]: a.get("value") for tag, a in page.elements if tag == "input"}.items()
        assert fields["payload"] in page.text
    assert (db.execute("SELECT FROM pgoutbox.message").fetchall(), audit_of(db)) == ([], [])


def test_a_dedupe_key_with_another_payload_is_reported_in_the_form(shop: Site, db: psycopg.Connection) -> None:
    form = {"topic": "search.index", "payload": "1", "dedupe_key": "d"}
    shop.ada.post("/enqueue", data=form)
    answer = shop.ada.post("/enqueue", data=form | {"payload": "2"})
    assert (answer.status_code, "another payload" in Page(answer.text).words) == (422, True)
    assert len(audit_of(db)) == 1


def test_a_viewer_may_not_enqueue(shop: Site, db: psycopg.Connection) -> None:
    assert shop.vera.get("/enqueue?topic=mail.welcome").status_code == 403
    assert shop.vera.post("/enqueue", data={"topic": "mail.welcome", "payload": WELCOME}).status_code == 403
    assert db.execute("SELECT FROM pgoutbox.message").fetchall() == []


@pytest.mark.parametrize(("role", "status"), [("pgoutbox_operator", 303), ("pgoutbox_viewer", 403)])
def test_enqueuing_needs_the_role_of_an_operator(
    dsn: str, db: psycopg.Connection, open_site: Callable[..., Site], role: str, status: int
) -> None:
    with login(dsn, role) as its_dsn:
        answer = open_site(its_dsn, topics_app.outbox).ada.post(
            "/enqueue", data={"topic": "mail.welcome", "payload": WELCOME}
        )
    assert (answer.status_code, "grant it pgoutbox_operator" in answer.text) == (status, status == 403)
    assert [row[2] for row in audit_of(db)] == (["enqueue"] if status == 303 else [])


def test_a_viewer_gets_no_forms_for_them(site: Site, db: psycopg.Connection) -> None:
    for state in (State.FAILED, State.PENDING):
        message_id = put(db, state)
        page = get(site.vera, f"/messages/{message_id}")
        assert not [path for path in page.values("form", "action") if path.startswith("/messages/")]
        for act in ("dismiss", "reschedule"):
            assert site.vera.post(f"/messages/{message_id}/{act}", data={"reason": "x"}).status_code == 403


def test_a_superseded_message_is_not_redriven(site: Site, db: psycopg.Connection) -> None:
    message_id, newer = put(db, State.FAILED, coalesce_key="k"), put(db, coalesce_key="k")
    answer = site.ada.post(f"/messages/{message_id}/redrive")
    assert answer.status_code == 409
    assert f"superseded by message {newer}" in Page(answer.text).words


@pytest.mark.parametrize(
    ("path", "form", "action", "details", "told"),
    [
        ("pause", {}, "pause", None, "until resumed by hand"),
        ("pause", {"duration": "2", "unit": "hours"}, "pause", None, "in 1 h"),
        ("rate", {"rate": "60", "per": "hour"}, "limit", {"rate": "60/3600s", "burst": 5}, "60 in 1 h, burst 5"),
        ("rate", {"rate": "9", "burst": "2"}, "limit", {"rate": "9/1s", "burst": 9}, "9 in 1 s, burst 9"),
        ("rate", {"rate": ""}, "limit", {"rate": "none"}, "no limit"),
        ("in-flight", {"in_flight": "7"}, "limit", {"max_in_flight": 7}, "of 7"),
        ("in-flight", {"in_flight": ""}, "limit", {"max_in_flight": "none"}, "1 in 1 min, burst 1"),
    ],
)
def test_an_operator_controls_a_queue(
    site: Site, db: psycopg.Connection, path: str, form: dict[str, str], action: str, details: object, told: str
) -> None:
    put(db, queue="bulk")
    Operator(db).limit_rate("bulk", Rate(1, 60))
    Operator(db).limit_in_flight("bulk", 3)
    assert f"/queues/bulk/{path}" in get(site.ada, "/queues?queue=bulk").values("form", "action")
    answer = site.ada.post(f"/queues/bulk/{path}", data=form, follow_redirects=True)
    assert answer.status_code == 200, answer.text
    assert told in Page(answer.text).words
    (act,) = audit_of(db)[2:]
    assert act[:5] == ("ada", "web 127.0.0.1", action, "bulk", None)
    assert path == "pause" or act[5] == details


def test_an_operator_learns_the_ceiling_of_a_queue(site: Site, db: psycopg.Connection) -> None:
    Operator(db).limit_ceiling("bulk", Rate(60, 3600))
    assert "60 in 1 h, burst 5 5.0 tokens now ceiling 60 in 1 h" in get(site.ada, "/queues").words
    answer = site.ada.post("/queues/bulk/rate", data={"rate": "100", "per": "hour"})
    assert answer.status_code == 409
    assert (
        "Rate 100 in 3600 s: the ceiling of queue bulk is 60 in 3600 s, which the owner of the schema has set. "
        "Set a lower value, or ask the owner to run: pgoutbox limit bulk --at-most RATE."
    ) in Page(answer.text).words
    assert "60 in 1 h, burst 5" in get(site.ada, "/queues").words


def test_the_audit_shows_no_burst_for_a_limit_without_one(site: Site, db: psycopg.Connection) -> None:
    db.execute("INSERT INTO pgoutbox.queue (name, max_in_flight) VALUES ('bulk', 3)")
    shown = get(site.ada, "/audit").words
    assert "max in flight 3" in shown
    assert "None" not in shown


def test_a_paused_queue_is_resumed(site: Site, db: psycopg.Connection) -> None:
    Operator(db).pause("bulk")
    assert "paused" in get(site.vera, "/").words
    answer = site.ada.post("/queues/bulk/resume", follow_redirects=True)
    assert "The queue is resumed" in Page(answer.text).words
    assert (
        site.ada.post("/queues/bulk/resume").headers["location"].startswith("/queues?queue=bulk&done=queue-not-paused")
    )


def test_an_empty_queue_can_be_controlled_by_its_name(site: Site, db: psycopg.Connection) -> None:
    page = get(site.ada, "/queues")
    assert "Queue name" in page.words
    assert ("get", "/queues") in {(a.get("method"), a.get("action")) for tag, a in page.elements if tag == "form"}
    assert {"name": "queue", "required": None, "maxlength": "63"}.items() <= dict(
        next(a for tag, a in page.elements if tag == "input" and a.get("name") == "queue")
    ).items()
    page = get(site.ada, "/queues?queue=bulk")
    assert "Queue bulk is empty and has no limits, and none of the newest 25,000 messages was in it." in page.words
    assert {f"/queues/bulk/{act}" for act in ("pause", "rate", "in-flight")} <= set(page.values("form", "action"))
    answer = site.ada.post("/queues/bulk/pause", data={"duration": "1", "unit": "hours"}, follow_redirects=True)
    assert "paused just now, resumes in 59 min" in Page(answer.text).words
    assert [act[:5] for act in audit_of(db)] == [("ada", "web 127.0.0.1", "pause", "bulk", None)]
    assert "Queue bulk is empty" not in get(site.ada, "/queues?queue=bulk").words


def test_a_queue_in_use_is_not_reported_as_misspelt(site: Site, db: psycopg.Connection) -> None:
    put(db, queue="other")
    for state in State:
        put(db, state, queue=f"of-{state}")
        page = get(site.ada, f"/queues?queue=of-{state}")
        assert f"Queue of-{state} is empty" not in page.words
        assert page.values("tr", "id") == [f"queue-of-{state}"]


def test_a_queue_name_is_validated_as_on_the_command_line(site: Site) -> None:
    for name in ("A", "1", "a b", "a'--", "x" * 64, "<script>"):
        answer = site.ada.get("/queues", params={"queue": name})
        assert answer.status_code == 422, name
        assert "queue: must be 1 to 63 of a-z, 0-9, underscore, dot and hyphen, the first a letter" in answer.text
    assert get(site.ada, "/queues?queue=").words == get(site.ada, "/queues").words


def test_a_viewer_sees_no_form_and_may_submit_none(site: Site, db: psycopg.Connection) -> None:
    message_id, failed = put(db), put(db, State.FAILED)
    assert "Another queue" not in get(site.vera, "/queues").words
    for path in (f"/messages/{message_id}", f"/messages/{failed}", "/queues?queue=bulk", "/failed", "/messages"):
        assert not [action for action in get(site.vera, path).values("form", "method") if action == "post"], path
        assert "/bulk" not in "".join(get(site.vera, path).values("a", "href"))
    forms = [f"/messages/{failed}/redrive", f"/messages/{message_id}/resend", f"/messages/{message_id}/cancel"]
    forms += [f"/queues/bulk/{act}" for act in ("pause", "resume", "rate", "in-flight")]
    forms += ["/bulk", "/bulk/1/stop"]
    for path in forms:
        assert site.vera.post(path, data={"do": "redrive"}).status_code == 403, path
    assert site.vera.get("/bulk?do=redrive").status_code == 403
    assert (audit_of(db), state_of(db, failed)) == ([], "failed")


def test_get_requests_change_nothing(site: Site, db: psycopg.Connection) -> None:
    failed = put(db, State.FAILED)
    for path in (f"/messages/{failed}/redrive", f"/messages/{failed}/cancel", "/queues/bulk/pause", "/bulk/1/stop"):
        assert site.ada.get(path).status_code == 405, path
    assert site.ada.get("/bulk?do=redrive").status_code == 200
    assert (audit_of(db), state_of(db, failed)) == ([], "failed")


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_an_unknown_message_id_is_not_found(site: Site) -> None:
    for message_id in ("0", "-1", "abc", "1 OR 1=1", "9223372036854775808", "10" * 50, "٣", "1.5", "%00", "4711"):
        assert site.ada.get(f"/messages/{message_id}").status_code == 404, message_id
        for act in ("redrive", "resend", "cancel"):
            assert site.ada.post(f"/messages/{message_id}/{act}").status_code == 404, (message_id, act)


def test_a_static_file_is_served_from_memory_and_only_if_the_browser_has_another_one(
    dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An upgrade may remove the files of a running dashboard."""
    file = tmp_path / "static" / "pgoutbox.js"
    file.parent.mkdir()
    file.write_text("let old;")
    monkeypatch.setattr(app_module, "files", lambda _: tmp_path)
    settings = web_settings(dsn=dsn)
    app = create_app(settings)
    file.unlink()
    with serving(app, settings) as url, httpx.Client(base_url=url, verify=False) as client:
        answer = client.get("/static/pgoutbox.js")
        assert (answer.status_code, answer.text) == (200, "let old;")
        assert answer.headers["content-type"] == "text/javascript; charset=utf-8"
        again = client.get("/static/pgoutbox.js", headers={"If-None-Match": answer.headers["etag"]})
        assert (again.status_code, again.text, again.headers["etag"]) == (304, "", answer.headers["etag"])
        assert client.get("/static/pgoutbox.js", headers={"If-None-Match": '"other"'}).text == "let old;"
        assert client.get("/static/other.js").status_code == 404


def test_a_path_cannot_escape_the_dashboard(site: Site) -> None:
    for path in (
        "/messages/../../etc/passwd",
        "/messages/..%2f..%2fetc",
        "/static/../rendering.py",
        "/static/%2e%2e/app.py",
    ):
        assert site.ada.get(path).status_code in (404, 405), path


INVALID_PARAMETERS: Final = [
    ("/messages?limit=1000000000", "limit"),
    ("/messages?limit=0", "limit"),
    ("/messages?limit=abc", "limit"),
    ("/messages?before=-1", "before"),
    ("/messages?before=9223372036854775808", "before"),
    ("/messages?id=x", "id"),
    ("/messages?state=lost", "state"),
    ("/messages?created_from=yesterday", "created_from"),
    ("/messages?created_before=0001-01-01T00:00%2B14:00", "created_before"),
    ("/messages?created_before=9999-12-31T23:59", "created_before"),
    ("/messages?text=%00", "text"),
    (f"/messages?topic={'x' * 501}", "topic"),
    ("/messages?group=' OR true", "group"),
    ("/messages?due=soon", "due"),
    ("/messages?ids=1&ids=x", "ids"),
    (f"/messages?{'&'.join(f'ids={number}' for number in range(1, 202))}", "ids"),
    ("/audit?limit=201", "limit"),
    ("/audit?before=1e9", "before"),
    ("/audit?action=drop", "action"),
    ("/audit?actor=%00", "actor"),
    ("/?range=2d", "range"),
    ("/queues?queue=bulk&range=2d", "range"),
    ("/queues?start=%00", "start"),
    ("/bulk", "do"),
    ("/bulk?do=delete", "do"),
    ("/bulk?do=redrive&state=x", "state"),
]


def test_an_invalid_parameter_is_named(site: Site) -> None:
    for path, name in INVALID_PARAMETERS:
        answer = site.ada.get(path)
        assert answer.status_code == 422, path
        assert re.search(rf"\b{name}: ", Page(answer.text).words), path


INVALID_FIELDS: Final = [
    ("pause", {"duration": "-1"}, "duration"),
    ("pause", {"duration": "9999999"}, "duration"),
    ("pause", {"duration": "5000", "unit": "days"}, "duration"),
    ("pause", {"unit": "years"}, "unit"),
    ("rate", {"rate": "0"}, "rate"),
    ("rate", {"rate": "1e3"}, "rate"),
    ("rate", {"rate": "5", "per": "year"}, "per"),
    ("rate", {"burst": "5"}, "burst"),
    ("in-flight", {"in_flight": "many"}, "in_flight"),
]


def test_an_invalid_field_is_named(site: Site, db: psycopg.Connection) -> None:
    for path, form, name in INVALID_FIELDS:
        answer = site.ada.post(f"/queues/bulk/{path}", data=form)
        assert answer.status_code == 422, (path, form)
        assert f"{name}: " in Page(answer.text).words
    assert audit_of(db) == []


def test_an_invalid_queue_name_is_refused(site: Site) -> None:
    for name in ("A", "1", "a b", "a'--", "x" * 64):
        answer = site.ada.post(f"/queues/{name}/pause")
        assert answer.status_code == 422, name
        assert "queue: " in answer.text


def test_a_missing_page_is_answered_in_text_to_clients_other_than_browsers(site: Site) -> None:
    answer = site.ada.get("/nowhere", headers={"Accept": "*/*"})
    assert (answer.status_code, answer.text) == (404, "Page not found.\n")


# --- bulk actions -----------------------------------------------------------------------------------------------------


def wait_for_bulk(site: Site, path: str) -> Page:
    (found,) = [known for known in site.dashboard.bulks.latest() if path.endswith(known.id)]
    wait_until(lambda: not found.is_running, lambda: str(found))
    return get(site.ada, path)


def test_a_bulk_is_previewed_and_executed(site: Site, db: psycopg.Connection) -> None:
    failed = [put(db, State.FAILED, topic="mail") for _ in range(12)]
    other = put(db, State.FAILED, topic="sms")
    page = get(site.ada, "/bulk?do=redrive&topic=mail")
    assert "12 messages match" in page.words
    assert ids_on(page) == failed[:1:-1]
    hidden = {(a["name"], a["value"]) for tag, a in page.elements if tag == "input" and a.get("type") == "hidden"}
    form = {str(name): str(value) for name, value in hidden if name != "csrf_token"}
    assert form == {"do": "redrive", "topic": "mail", "state": "failed"}
    answer = site.ada.post("/bulk", data=form)
    assert answer.status_code == 303
    done = wait_for_bulk(site, answer.headers["location"])
    assert "Done." in done.words
    assert "redriven 12" in done.words
    assert {state_of(db, message_id) for message_id in failed} == {"pending"}
    assert state_of(db, other) == "failed"
    ((actor, origin, action, _, ids, _),) = audit_of(db)
    ((stated,),) = db.execute("SELECT stated FROM pgoutbox.audit").fetchall()
    assert (actor, origin, action, ids) == ("ada", "web 127.0.0.1", "redrive", failed)
    assert stated == {"topic": "mail", "states": ["failed"]}


def test_selected_messages_are_previewed_and_redriven(
    site: Site, db: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reads, "SEARCH_ROWS", 3)
    failed = [put(db, State.FAILED) for _ in range(9)]
    pending = put(db)
    page = get(site.ada, "/messages?state=failed")
    boxes = [a for tag, a in page.elements if tag == "input" and a.get("name") == "ids" and a.get("type") == "checkbox"]
    assert [box["value"] for box in boxes] == [str(message_id) for message_id in failed[::-1]]
    (form,) = [a for tag, a in page.elements if tag == "form" and a.get("id") == "selection"]
    assert {box["form"] for box in boxes} == {"selection"}
    assert page.values("button", "value") == ["redrive", "dismiss"]
    # Apart from each other by more rows than a search reads.
    chosen = [failed[0], failed[8]]
    given: list[tuple[str, str]] = [("ids", ""), *(("ids", str(message_id)) for message_id in chosen)]
    preview = get(site.ada, f"{form['action']}?{urlencode([*given, ('do', 'redrive'), ('state', 'failed')])}")
    assert "2 messages match." in preview.words
    assert ids_on(preview) == chosen[::-1]
    hidden = [(a["name"], a["value"]) for tag, a in preview.elements if tag == "input" and a.get("type") == "hidden"]
    sent = urlencode([(str(name), str(value)) for name, value in hidden if name != "csrf_token"])
    headers = {"Content-Type": "application/x-www-form-urlencoded"}
    answer = site.ada.post("/bulk", content=sent, headers=headers)
    assert "redriven 2" in wait_for_bulk(site, answer.headers["location"]).words
    assert [message for message in failed if state_of(db, message) == "pending"] == chosen
    ((stated,),) = db.execute("SELECT stated FROM pgoutbox.audit").fetchall()
    assert stated == {"states": ["failed"], "ids": chosen}
    words = get(site.ada, f"/bulk?do=redrive&ids={failed[1]}&ids={pending}").words
    assert "1 message matches." in words
    assert "1 of the selected messages is in a state that this action does not change." in words


def test_nothing_is_selected_without_a_selection(site: Site, db: psycopg.Connection) -> None:
    failed = put(db, State.FAILED)
    for answer in (site.ada.get("/bulk?do=redrive&ids="), site.ada.post("/bulk", data={"do": "redrive", "ids": ""})):
        assert (answer.status_code, "ids: select at least one message" in Page(answer.text).words) == (422, True)
    assert state_of(db, failed) == "failed"
    assert "selection" not in site.vera.get("/messages").text
    assert "selection" not in site.ada.get("/messages?state=sent").text


def test_a_whole_page_of_messages_can_be_selected(site: Site, db: psycopg.Connection) -> None:
    failed = [put(db, State.FAILED) for _ in range(12)]
    ids = [*range(failed[-1] + 1, failed[-1] + inputs.MAX_LIMIT - 11), *failed]
    form = {"do": "redrive", "state": "failed", "ids": list(map(str, ids))}
    assert ids_on(get(site.ada, f"/bulk?{urlencode(form, doseq=True)}")) == failed[::-1]
    answer = site.ada.post("/bulk", data=form)
    assert "redriven 12" in wait_for_bulk(site, answer.headers["location"]).words


def test_a_bulk_reschedules_only_messages_of_its_tab(site: Site, db: psycopg.Connection) -> None:
    put(db)
    later = put(db)
    db.execute("UPDATE pgoutbox.message SET available_at = now() + interval '1 day' WHERE id = %s", [later])
    assert ids_on(get(site.ada, "/bulk?do=reschedule&state=pending&due=later")) == [later]
    answer = site.ada.post("/bulk", data={"do": "reschedule", "state": "pending", "due": "later"})
    assert "rescheduled 1" in wait_for_bulk(site, answer.headers["location"]).words
    assert [row[4] for row in audit_of(db)] == [[later]]


def test_a_bulk_cancels_owed_messages(site: Site, db: psycopg.Connection) -> None:
    pending, sending, sent = put(db), put(db, State.SENDING), put(db, State.SENT)
    page = wait_for_bulk(site, site.ada.post("/bulk", data={"do": "cancel"}).headers["location"])
    assert "cancelled 1" in page.words
    assert "requested 1" in page.words
    assert [state_of(db, message_id) for message_id in (pending, sending, sent)] == ["cancelled", "sending", "sent"]


def test_a_bulk_dismisses_failed_messages(site: Site, db: psycopg.Connection) -> None:
    failed, pending = put(db, State.FAILED), put(db)
    assert "reason" in get(site.ada, "/bulk?do=dismiss").values("input", "name")
    refused = site.ada.post("/bulk", data={"do": "dismiss"})
    assert (refused.status_code, "reason: say why" in Page(refused.text).words) == (422, True)
    answer = site.ada.post("/bulk", data={"do": "dismiss", "reason": "spam"})
    assert "dismissed 1" in wait_for_bulk(site, answer.headers["location"]).words
    assert [state_of(db, message_id) for message_id in (failed, pending)] == ["skipped", "pending"]


def test_a_bulk_reschedules_pending_messages(site: Site, db: psycopg.Connection) -> None:
    put(db)
    assert "available_at" in get(site.ada, "/bulk?do=reschedule").values("input", "name")
    answer = site.ada.post("/bulk", data={"do": "reschedule", "available_at": "2030-01-01T10:00"})
    assert "rescheduled 1" in wait_for_bulk(site, answer.headers["location"]).words
    moments = db.execute("SELECT available_at = '2030-01-01 10:00+00' FROM pgoutbox.message").fetchall()
    assert moments == [(True,)]


@pytest.mark.parametrize(
    ("action", "wanted", "found", "told"),
    [
        ("redrive", State.FAILED, State.CANCELLED, "wrong state 1"),
        ("cancel", State.PENDING, State.SENDING, "sending 1"),
    ],
)
def test_a_bulk_skips_messages_that_have_left_the_states_of_its_filter(
    site: Site,
    db: psycopg.Connection,
    monkeypatch: pytest.MonkeyPatch,
    action: str,
    wanted: State,
    found: State,
    told: str,
) -> None:
    message_id = put(db, wanted)
    cancelled: LiteralString = "UPDATE pgoutbox.message SET state = 'cancelled' WHERE id = %s"
    statement = PUT_SENDING if found is State.SENDING else cancelled
    meanwhile(monkeypatch, lambda: db.execute(statement, [message_id]))
    page = wait_for_bulk(site, site.ada.post("/bulk", data={"do": action, "state": wanted}).headers["location"])
    assert told in page.words
    assert state_of(db, message_id) == found
    (asked,) = db.execute("SELECT m.cancel_requested_at FROM pgoutbox.message_view AS m WHERE m.id = %s", [message_id])
    assert asked == (None,)
    assert audit_of(db) == []


def test_a_bulk_skips_messages_that_have_failed_again(
    site: Site, db: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    message_id = put(db, State.FAILED)
    failed_anew: LiteralString = (
        "UPDATE pgoutbox.message SET attempt_count = attempt_count + 1, last_error = 'outcome unknown' WHERE id = %s"
    )
    meanwhile(monkeypatch, lambda: db.execute(failed_anew, [message_id]))
    form = {"do": "redrive", "state": "failed", "text": "no such mailbox"}
    page = wait_for_bulk(site, site.ada.post("/bulk", data=form).headers["location"])
    assert "changed 1" in page.words
    assert (state_of(db, message_id), audit_of(db)) == ("failed", [])


def test_a_redrive_applies_only_to_the_state_on_the_page(site: Site, db: psycopg.Connection) -> None:
    message_id = put(db, State.FAILED)
    shown = get(site.ada, f"/messages/{message_id}")
    (action,) = {path for path in shown.values("form", "action") if path.endswith("/redrive")}
    (state,) = {field for field in shown.values("input", "value") if field == "failed"}
    with psycopg.connect(db.info.dsn, password=db.info.password, autocommit=True) as other:
        Operator(other).redrive(message_id)
        assert Operator(other).cancel(message_id).result == "cancelled"
    answer = site.ada.post(action, data={"state": state})
    assert answer.status_code == 409
    assert "is cancelled; only failed messages can be redriven" in Page(answer.text).words
    assert state_of(db, message_id) == "cancelled"


def test_a_redrive_of_a_group_affects_no_other_failures(site: Site, db: psycopg.Connection) -> None:
    group = [fail_with(db, f"user {number} is unknown") for number in range(3)]
    others = [fail_with(db, "user # is not known"), fail_with(db, "user 1 is unknown", topic="sms")]
    (path,) = [
        href
        for href in get(site.ada, "/failed").values("a", "href")
        if href.startswith("/bulk?do=redrive") and "group=" in href and "topic=mail" in href
        if "3 messages match" in get(site.ada, href).words
    ]
    page = get(site.ada, path)
    form = {str(a["name"]): str(a["value"]) for tag, a in page.elements if tag == "input" and a.get("name")}
    wait_for_bulk(site, site.ada.post("/bulk", data=form).headers["location"])
    assert {state_of(db, message_id) for message_id in group} == {"pending"}
    assert {state_of(db, message_id) for message_id in others} == {"failed"}


def test_a_bulk_skips_messages_created_after_its_beginning(
    site: Site, db: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk, "_BATCH", 2)
    early = [put(db, State.FAILED) for _ in range(5)]
    late: list[int] = []
    before_each_batch(monkeypatch, lambda: late.append(put(db, State.FAILED)))
    wait_for_bulk(site, site.ada.post("/bulk", data={"do": "redrive"}).headers["location"])
    assert {state_of(db, message_id) for message_id in early} == {"pending"}
    assert {state_of(db, message_id) for message_id in late} == {"failed"}


class Gate:
    """Hold bulks, in batches of two, before each batch."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.opened = threading.Event()

    def pass_through(self) -> None:
        self.reached.set()
        assert self.opened.wait(PROCESS_PATIENCE_SECONDS)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    monkeypatch.setattr(bulk, "_BATCH", 2)
    gate = Gate()
    before_each_batch(monkeypatch, gate.pass_through)
    yield gate
    gate.opened.set()


def test_a_bulk_shows_its_progress_and_can_be_stopped(site: Site, db: psycopg.Connection, gate: Gate) -> None:
    ids = [put(db, State.FAILED) for _ in range(6)]
    path = site.ada.post("/bulk", data={"do": "redrive"}).headers["location"]
    assert gate.reached.wait(PROCESS_PATIENCE_SECONDS)
    page = get(site.ada, path)
    assert "Running." in page.words
    assert "2" in page.values("meta", "content"), "the page does not reload itself without scripts"
    assert f"{path}/stop" in page.values("form", "action")
    assert f"{path}/stop" not in get(site.vera, path).values("form", "action")
    assert site.ada.post(f"{path}/stop").status_code == 303
    gate.opened.set()
    assert "Stopped." in wait_for_bulk(site, path).words
    assert [state_of(db, message_id) for message_id in ids] == ["pending"] * 2 + ["failed"] * 4


def test_the_number_of_concurrent_bulks_is_limited(site: Site, db: psycopg.Connection, gate: Gate) -> None:
    put(db, State.FAILED)
    paths = [site.ada.post("/bulk", data={"do": "redrive"}).headers["location"] for _ in range(2)]
    refused = site.ada.post("/bulk", data={"do": "redrive"})
    assert refused.status_code == 409
    assert "2 bulk actions are running" in Page(refused.text).words
    assert "Running:" in get(site.ada, "/bulk?do=redrive").words
    gate.opened.set()
    for path in paths:
        wait_for_bulk(site, path)
    assert site.ada.post("/bulk", data={"do": "redrive"}).status_code == 303


def test_a_bulk_ends_at_its_limit(site: Site, db: psycopg.Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "MAX_MESSAGES", 3)
    monkeypatch.setattr(bulk, "_BATCH", 2)
    ids = [put(db, State.FAILED) for _ in range(5)]
    page = wait_for_bulk(site, site.ada.post("/bulk", data={"do": "redrive"}).headers["location"])
    assert "Ended after" in page.words
    assert [state_of(db, message_id) for message_id in ids] == ["pending"] * 3 + ["failed"] * 2


def test_a_preview_counts_only_among_the_newest_messages(
    site: Site, db: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reads, "SEARCH_ROWS", 4)
    for _ in range(6):
        put(db, State.FAILED)
    assert "4+ messages match among the newest 4" in get(site.ada, "/bulk?do=redrive").words


@pytest.mark.parametrize(("do", "state"), [("redrive", "sent"), ("cancel", "failed")])
def test_a_bulk_for_states_that_it_cannot_change_is_refused(site: Site, do: str, state: str) -> None:
    assert site.ada.get(f"/bulk?do={do}&state={state}").status_code == 409
    assert site.ada.post("/bulk", data={"do": do, "state": state}).status_code == 409


def test_a_bulk_reports_a_lost_database(site: Site, db: psycopg.Connection, gate: Gate) -> None:
    put(db, State.FAILED)
    path = site.ada.post("/bulk", data={"do": "redrive"}).headers["location"]
    assert gate.reached.wait(PROCESS_PATIENCE_SECONDS)
    db.execute(
        """
        SELECT pg_terminate_backend(pid)
        FROM pg_stat_activity
        WHERE datname = current_database() AND application_name = 'pgoutbox web'
        """
    )
    gate.opened.set()
    page = wait_for_bulk(site, path)
    assert "Ended early because of an error." in page.words
    assert "the database reported an error" in page.words


def test_an_unknown_bulk_is_not_found(site: Site) -> None:
    assert site.ada.get("/bulk/deadbeef").status_code == 404
    assert site.ada.post("/bulk/deadbeef/stop").status_code == 404


# --- when the database is away ----------------------------------------------------------------------------------------

PATHS: Final = [
    "/",
    "/messages",
    "/messages/1",
    "/queues",
    "/queues?queue=a",
    "/workers",
    "/breakers",
    "/schedules",
    "/failed",
    "/audit",
    "/bulk?do=redrive",
]


def test_without_a_database_every_page_reports_only_that(tmp_path: Path, open_site: Callable[..., Site]) -> None:
    site = open_site(f"postgresql://app:{CANARY}@/nowhere?host={tmp_path}")
    for path in PATHS:
        answer = site.ada.get(path)
        assert answer.status_code == 503, path
        assert "The database cannot be reached." in Page(answer.text).words
        assert answer.headers["retry-after"]
        for secret in (CANARY, "Traceback", "psycopg", str(tmp_path), "nowhere"):
            assert secret not in answer.text
    answer = site.ada.post("/messages/1/redrive", headers={"Accept": "*/*"})
    assert (answer.status_code, answer.text) == (503, "The database cannot be reached.\n")


def test_without_a_database_an_invalid_parameter_is_still_named(tmp_path: Path, open_site: Callable[..., Site]) -> None:
    site = open_site(f"postgresql://app@/nowhere?host={tmp_path}")
    for path, name in [*INVALID_PARAMETERS, ("/queues?queue=No such", "queue"), ("/topics?start=%00", "start")]:
        answer = site.ada.get(path)
        assert answer.status_code == 422, path
        assert re.search(rf"\b{name}: ", Page(answer.text).words), path
    assert site.ada.get("/messages/abc").status_code == 404


def test_a_schema_that_needs_a_later_package_is_told_in_its_words(
    dsn: str, db: psycopg.Connection, open_site: Callable[..., Site]
) -> None:
    db.execute(
        "INSERT INTO pgoutbox.revision (number, lowest_package, applied_by, digest) VALUES (2, '99.1', '99.1', 'x')"
    )
    answer = open_site(dsn).ada.get("/")
    assert answer.status_code == 503
    assert "needs version 99.1 of the package or a later one" in answer.text


def test_without_the_schema_the_page_names_the_command(empty_dsn: str, open_site: Callable[..., Site]) -> None:
    answer = open_site(empty_dsn).ada.get("/")
    assert answer.status_code == 503
    assert "pgoutbox migrate" in answer.text


def test_a_slow_query_is_abandoned(site: Site, connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    blocker = connect()
    blocker.execute("LOCK TABLE pgoutbox.message")
    with monkeypatch.context() as impatient:
        impatient.setattr(database, "STATEMENT_SECONDS", 0.1)
        assert "was cancelled" in Page(site.ada.get("/messages").text).words
        assert site.ada.get("/messages").status_code == 503
        assert site.ada.post("/messages/1/cancel").status_code == 503
    blocker.rollback()
    assert site.ada.get("/messages").status_code == 200


def test_a_page_does_not_wait_for_a_dead_network(
    dsn: str, tmp_path: Path, open_site: Callable[..., Site], db: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    with proxy_to(dsn, tmp_path) as proxy:
        site = open_site(proxy.dsn)
        assert site.ada.get("/messages").status_code == 200
        (kept,) = site.dashboard.database._idle
        with proxy.stalled("pgoutbox web", open_connections_only=True):
            with monkeypatch.context() as impatient:
                impatient.setattr(database, "ANSWER_SECONDS", 0.3)
                assert "did not answer in time" in Page(site.ada.get("/messages").text).words
            # It is broken, so that no thread waits on it any more.
            wait_until(lambda: kept.connection.closed, lambda: "the connection that hung is still open")
            assert site.ada.get("/messages").status_code == 200
        site.dashboard.close()


def test_an_act_with_an_unanswered_commit_is_reported_as_uncertain(
    dsn: str, tmp_path: Path, open_site: Callable[..., Site], db: psycopg.Connection
) -> None:
    counted, message_id = put(db, State.SENT), put(db, State.SENT)
    with proxy_to(dsn, tmp_path) as proxy:
        site = open_site(proxy.dsn)
        begun_at = len(proxy.statements)
        assert site.ada.post(f"/messages/{counted}/resend").status_code == 303
        proxy.cut_at(proxy.statements[begun_at:].index("COMMIT") + 1, Moment.REPLY_LOST)
        answer = site.ada.post(f"/messages/{message_id}/resend")
        proxy.wait_for_cut()
        site.dashboard.close()
    assert answer.status_code == 503
    assert "the action may have succeeded: check before you repeat it" in Page(answer.text).words
    copies = db.execute("SELECT count(*) FROM pgoutbox.message WHERE resend_of = %s", [message_id])
    assert copies.fetchall() == [(1,)]


def test_an_act_past_its_timeout_is_reported_as_uncertain(
    site: Site, db: psycopg.Connection, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    message_id = put(db)
    connect().execute("LOCK TABLE pgoutbox.message")
    monkeypatch.setattr(database, "ANSWER_SECONDS", 0.1)
    words = Page(site.ada.post(f"/messages/{message_id}/cancel").text).words
    assert "did not answer in time; the action may have succeeded: check before you repeat it" in words


def test_connections_that_died_while_idle_are_replaced(site: Site, db: psycopg.Connection) -> None:
    assert site.ada.get("/messages").status_code == 200
    (ended,) = db.execute(
        """
        SELECT count(pg_terminate_backend(pid))
        FROM pg_stat_activity
        WHERE datname = current_database() AND application_name = 'pgoutbox web'
        """
    ).fetchall()
    assert ended == (1,)
    assert site.ada.get("/messages").status_code == 200


def test_a_viewer_role_is_told_which_privilege_it_lacks(
    dsn: str, open_site: Callable[..., Site], db: psycopg.Connection
) -> None:
    message_id = put(db, State.FAILED)
    role = f"looker_{db.info.backend_pid}"
    db.execute(f"CREATE ROLE {role} LOGIN".encode())
    try:
        db.execute(f"GRANT USAGE ON SCHEMA pgoutbox TO {role}".encode())
        db.execute(f"GRANT SELECT ON ALL TABLES IN SCHEMA pgoutbox TO {role}".encode())
        db.execute(f"GRANT SELECT ON ALL SEQUENCES IN SCHEMA pgoutbox TO {role}".encode())
        db.execute(f"GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA pgoutbox TO {role}".encode())
        db.execute(f"REVOKE EXECUTE ON FUNCTION pgoutbox.redrive FROM {role}".encode())
        site = open_site(psycopg.conninfo.make_conninfo(dsn, options=f"-c role={role}"))
        assert site.ada.get("/").status_code == 200
        answer = site.ada.post(f"/messages/{message_id}/redrive")
        assert answer.status_code == 403
        assert "role" in Page(answer.text).words
    finally:
        db.execute(f"DROP OWNED BY {role}".encode())
        db.execute(f"DROP ROLE {role}".encode())


# --- more than a page holds ------------------------------------------------------------------------------------------


def test_a_page_shows_a_limited_part_of_a_message(site: Site, db: psycopg.Connection) -> None:
    message_id = put(db, State.FAILED)
    db.execute(
        """
        UPDATE pgoutbox.message
        SET payload = to_jsonb(repeat('p', 3000000)),
            headers = jsonb_build_object('note', repeat('h', 3000000)),
            last_error = repeat('e', 3000000)
        """
    )
    page = get(site.ada, f"/messages/{message_id}")
    assert len(page.text) < 300_000
    assert page.words.count(f"pgoutbox show {message_id} --whole") == 2
    assert "3 MiB, shown as text: the first 64 KiB." in page.words


def test_json_that_python_cannot_parse_is_shown_as_text(site: Site, db: psycopg.Connection) -> None:
    message_id = put(db)
    for payload in ('{"x": 1e131071}', "[" * 3000 + "]" * 3000, '{"a":' * 999 + "1" + "}" * 999):
        db.execute("UPDATE pgoutbox.message SET payload = %s::jsonb, headers = %s::jsonb", [payload, payload])
        assert get(site.ada, f"/messages/{message_id}").words.count("shown as text") == 2, payload[:9]


def test_other_requests_are_answered_while_a_page_is_rendered(
    site: Site, db: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    message_id = put(db)
    answers: list[int] = []

    def pretty(value: object) -> str:
        answers.append(httpx.get(f"{site.url}/healthz", timeout=PROCESS_PATIENCE_SECONDS).status_code)
        return str(value)

    get(site.ada, "/")
    monkeypatch.setitem(rendering._environment().filters, "pretty", pretty)
    get(site.ada, f"/messages/{message_id}")
    assert answers == [200]


# --- live -------------------------------------------------------------------------------------------------------------


def test_a_change_in_the_database_is_sent_to_all_viewers(site: Site, db: psycopg.Connection) -> None:
    with site.ada.stream("GET", "/live") as ours, site.vera.stream("GET", "/live") as theirs:
        lines = [ours.iter_lines(), theirs.iter_lines()]
        for stream in lines:
            assert next(line for line in stream if line.startswith("event:")) == "event: change"
        before = site.dashboard.feed.changes
        put(db)
        for stream in lines:
            told = next(int(line[6:]) for line in stream if line.startswith("data: ") and int(line[6:]) > before)
            assert told > before
        readers = db.execute(
            """
            SELECT count(*)
            FROM pg_stat_activity
            WHERE datname = current_database() AND application_name = 'pgoutbox web'
            """
        ).fetchall()
        assert readers == [(1,)], "more than one connection was used"
        assert ours.headers["content-type"].startswith("text/event-stream")
    wait_until(lambda: site.dashboard.feed.followers == 0, lambda: "the streams are still open")


def test_a_new_stream_learns_of_changes_since_its_page_was_made(site: Site) -> None:
    with site.ada.stream("GET", "/live") as ours:
        lines = ours.iter_lines()  # An iterator without a reference closes its stream.
        assert next(line for line in lines if line.startswith("event:")) == "event: change"
        with site.vera.stream("GET", "/live") as theirs:
            told = next(line for line in theirs.iter_lines() if line.startswith(("event:", ":")))
            assert told == "event: change", "no event before the first heartbeat"


def test_without_viewers_nothing_is_read(site: Site, db: psycopg.Connection) -> None:
    with site.ada.stream("GET", "/live") as stream:
        next(stream.iter_lines())
    wait_until(
        lambda: (
            db.execute(
                """
            SELECT count(*) = 0
            FROM pg_stat_activity
            WHERE datname = current_database() AND application_name = 'pgoutbox web'
            """
            ).fetchall()
            == [(True,)]
        ),
        lambda: "the reader is still connected",
    )


def test_too_many_streams_are_refused(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "MAX_STREAMS", 1)
    with site.ada.stream("GET", "/live") as first:
        lines = first.iter_lines()
        next(lines)
        with site.vera.stream("GET", "/live") as second:
            assert second.status_code == 503


def test_a_new_stream_replaces_the_oldest_of_the_same_browser(site: Site) -> None:
    with ExitStack() as stack:
        theirs = stack.enter_context(site.vera.stream("GET", "/live")).iter_lines()
        ours = [stack.enter_context(site.ada.stream("GET", "/live")).iter_lines() for _ in range(6)]
        assert [[line for line in lines if line.startswith("event:")][-1] for lines in ours[:2]] == [
            "event: replaced"
        ] * 2
        assert next(line for line in theirs if line.startswith("event:")) == "event: change"
        assert site.dashboard.feed.followers == 5


def test_one_user_cannot_take_all_streams(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "_STREAMS_OF_A_BROWSER", 100)
    monkeypatch.setattr(live, "_STREAMS_OF_A_NAME", 2)
    monkeypatch.setattr(live, "MAX_STREAMS", 3)
    with ExitStack() as stack:
        for _ in range(5):
            assert stack.enter_context(site.ada.stream("GET", "/live")).status_code == 200
        assert stack.enter_context(site.vera.stream("GET", "/live")).status_code == 200


def test_a_stream_ends_after_some_time_so_that_sessions_expire(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "_LIFE_SECONDS", 0.2)
    assert site.ada.get("/live").text.startswith("retry: ")


def test_a_stream_survives_a_database_restart(
    dsn: str, tmp_path: Path, open_site: Callable[..., Site], db: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "_RETRY_SECONDS", 0.05)
    site = open_site(dsn)
    with site.ada.stream("GET", "/live") as stream:
        lines = stream.iter_lines()
        next(line for line in lines if line.startswith("event:"))
        db.execute(
            """
            SELECT pg_terminate_backend(pid)
            FROM pg_stat_activity
            WHERE datname = current_database() AND application_name = 'pgoutbox web'
            """
        )
        put(db)
        next(line for line in lines if line.startswith("event:"))


# --- mounted ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["fastapi", "starlette", "nested"])
def test_the_dashboard_can_be_mounted_anywhere(dsn: str, db: psycopg.Connection, host: str) -> None:
    message_id = put(db, State.FAILED)
    settings = web_settings(dsn=dsn)
    dashboard = create_app(settings)
    prefix, app = "/admin/outbox", Starlette(routes=[Mount("/admin/outbox", dashboard)])
    if host == "nested":
        app = Starlette(routes=[Mount("/admin", Starlette(routes=[Mount("/outbox", dashboard)]))])
    if host == "fastapi":
        served = FastAPI()
        served.mount(prefix, dashboard)
        app = served
    headers = {"Authorization": f"Bearer {OPERATOR_TOKEN}", **AS_BROWSER}
    with serving(app, settings) as url, httpx.Client(base_url=url, headers=headers, verify=False) as client:
        for path in ("/", "/messages", f"/messages/{message_id}", "/queues", "/failed", "/audit"):
            page = get(client, f"{prefix}{path}")
            links = [*page.values("a", "href"), *page.values("form", "action"), *page.values("link", "href")]
            assert all(link.startswith((f"{prefix}/", "#")) for link in [*links, *page.values("script", "src")]), path
        assert client.get(f"{prefix}/static/pgoutbox.js").status_code == 200
        answer = client.post(f"{prefix}/messages/{message_id}/redrive")
        assert answer.headers["location"] == f"{prefix}/messages/{message_id}?done=redriven"
        assert "is pending again" in get(client, answer.headers["location"]).words
    dashboard.state.dashboard.close()


def test_a_forged_host_changes_no_link(site: Site) -> None:
    answer = site.ada.get("/", headers={"Host": "evil.example"})
    assert "evil.example" not in answer.text


def test_explicit_settings_take_precedence_over_those_of_the_outbox(dsn: str, open_site: Callable[..., Site]) -> None:
    site = open_site(dsn, Outbox(load_settings(dsn="postgresql://nowhere.invalid/x")))
    assert site.ada.get("/").status_code == 200


# --- rights -----------------------------------------------------------------------------------------------------------

PAGES: Final = (
    "/",
    "/messages",
    "/topics",
    "/queues",
    "/queues?queue=bulk",
    "/queues?start=b",
    "/queues?queue=bulk&range=14d",
    "/?range=24h",
    "/workers",
    "/breakers",
    "/schedules",
    "/failed",
    "/messages?text=no+such&state=failed",
    "/messages?state=pending&due=now",
    "/messages?ids=1&ids=2",
    "/topics?start=mail",
)
OPERATORS_PAGES: Final = ("/audit", "/bulk?do=redrive", "/bulk?do=dismiss&ids=1&ids=2")


@pytest.mark.parametrize("role", ["pgoutbox_viewer", "pgoutbox_operator"])
def test_a_login_with_one_role_sees_the_same_as_the_owner(
    dsn: str, db: psycopg.Connection, open_site: Callable[..., Site], role: str
) -> None:
    older = put(db, coalesce_key="k")
    message_id = put(db, State.FAILED, destination="mailto:ada@example.org", coalesce_key="k")
    db.execute(
        "UPDATE pgoutbox.message SET state = 'skipped', finished_at = now(), skip_reason = 'superseded', "
        "superseded_by = %s WHERE id = %s",
        [message_id, older],
    )
    db.execute(ADD_ATTEMPT, [message_id, 1])
    put(db, State.SENDING, queue="bulk")
    put(db, State.PENDING, ordering_key="o")
    put(db, State.SENT)
    Operator(db).limit_rate("limited", Rate(60, 60))
    db.execute("ANALYZE pgoutbox.message")
    with login(dsn, role) as its_dsn:
        site, owners = open_site(its_dsn), open_site(dsn)
        for path in PAGES:
            assert told_on(site, path) == told_on(owners, path), path
        page = get(site.ada, f"/messages/{message_id}")
        group = next(href for href in get(site.ada, "/failed").values("a", "href") if "group=" in href)
        assert ids_on(get(site.ada, group)) == [message_id]
    assert f"Supersedes message {older}" in page.words
    assert all(told in page.words for told in ("mailto:ada@example.org", "no such mailbox", "retry", "busy"))
    assert '"to": "(redacted)"' in page.words
    assert "cannot read the values" in page.words
    assert "ada@" in get(owners.ada, f"/messages/{message_id}").text


def test_a_viewer_sees_no_value_that_the_views_hide(site: Site, db: psycopg.Connection) -> None:
    message_id = put(db, State.FAILED)
    db.execute(
        """
        UPDATE pgoutbox.message
        SET payload = '{"note": "c4n4ry"}', headers = '{"x-note": "c4n4ry"}', last_error = 'X-Api-Key: c4n4ry'
        """
    )
    for client, is_shown in ((site.vera, False), (site.ada, True)):
        page = get(client, f"/messages/{message_id}")
        assert page.text.count("c4n4ry") == (2 if is_shown else 0)
        assert ("A viewer cannot read the values" in page.words) != is_shown
        assert all(told in page.words for told in ("note", "x-note", "X-Api-Key: (redacted)"))
        assert "c4n4ry" not in get(client, "/failed").text + get(client, "/messages").text


def told_on(site: Site, path: str) -> list[str]:
    """Return the words of a page after its hour is counted, without numbers that grow."""

    def look() -> str | None:
        site.dashboard.forget()
        words = get(site.ada, path).words
        return None if "Still counting" in words else words

    words = wait_until(look, lambda: "the last hour is not counted")
    assert words is not None
    return re.sub(r"\d+(\.\d+)? (ms|s|tokens)\b( ago)?|just now|\d\d:\d\d(:\d\d)?", "-", words).split()


def test_statistics_are_available_to_a_viewer_role(
    dsn: str, db: psycopg.Connection, open_site: Callable[..., Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reads, "CAP", 5)
    for _ in range(8):
        put(db, State.SENT)
    db.execute("ANALYZE pgoutbox.message")
    with login(dsn, "pgoutbox_viewer") as its_dsn:
        assert "sent 8 estimated" in get(open_site(its_dsn).ada, "/").words


@pytest.mark.parametrize(("role", "acts"), [("pgoutbox_operator", True), ("pgoutbox_viewer", False)])
def test_a_login_with_one_role_can_act_or_learns_which_role_it_needs(
    dsn: str, db: psycopg.Connection, open_site: Callable[..., Site], role: str, acts: bool
) -> None:
    failed, owed, sent, many = (put(db, state) for state in (State.FAILED, State.PENDING, State.SENT, State.FAILED))
    forms: list[tuple[str, dict[str, str]]] = [
        (f"/messages/{failed}/redrive", {}),
        (f"/messages/{owed}/cancel", {}),
        (f"/messages/{sent}/resend", {}),
        ("/queues/default/pause", {}),
        ("/queues/default/resume", {}),
        ("/queues/default/rate", {"rate": "60"}),
        ("/queues/default/in-flight", {"in_flight": "7"}),
    ]
    with login(dsn, role) as its_dsn:
        site = open_site(its_dsn)
        answers = [site.ada.post(path, data=form) for path, form in forms]
        audit = site.ada.get("/audit")
        shown = get(site.ada, f"/messages/{failed}").words
        bulk_page = wait_for_bulk(site, site.ada.post("/bulk", data={"do": "redrive"}).headers["location"]).words
    if acts:
        assert [answer.status_code for answer in answers] == [303] * len(forms)
        assert audit.status_code == 200
        assert "redrive" in shown
        assert [row[2] for row in audit_of(db)][:3] == ["redrive", "cancel", "resend"]
        assert state_of(db, many) == "pending"
    else:
        wanted = "The database role of this dashboard cannot {}: grant it pgoutbox_operator."
        assert {(answer.status_code, wanted.format("do this") in answer.text) for answer in answers} == {(403, True)}
        assert (audit.status_code, wanted.format("read the audit") in audit.text) == (403, True)
        assert "cannot read the audit: grant it pgoutbox_operator" in shown
        assert "grant it pgoutbox_operator" in bulk_page
        assert (audit_of(db), state_of(db, many)) == ([], "failed")


def test_a_login_with_a_viewer_role_learns_that_it_may_not_read_acts(
    dsn: str, db: psycopg.Connection, open_site: Callable[..., Site]
) -> None:
    with login(dsn, "pgoutbox_viewer") as its_dsn:
        site = open_site(its_dsn)
        with site.vera.stream("GET", "/live") as stream:
            lines = stream.iter_lines()
            next(line for line in lines if line.startswith("event:"))
            before = site.dashboard.feed.changes
            Operator(db, actor="ada").pause("bulk")
            wait_until(lambda: site.dashboard.feed.changes > before, lambda: "nobody is told about the pause")


@pytest.mark.parametrize("roles", [(), ("pgoutbox_producer",)])
def test_a_login_without_privileges_sees_only_that_message(
    dsn: str, db: psycopg.Connection, open_site: Callable[..., Site], roles: tuple[str, ...]
) -> None:
    put(db, State.FAILED)
    with login(dsn, *roles) as its_dsn:
        site = open_site(its_dsn)
        for path in (*PAGES, *OPERATORS_PAGES, "/messages/1"):
            words = get(site.ada, path, 403).words
            assert "grant it pgoutbox_" in words, path
            assert "mail" not in words, path


# --- the redirect -----------------------------------------------------------------------------------------------------

WARNING_PAGES: Final = (
    "/",
    "/messages",
    "/failed",
    "/queues",
    "/queues?queue=a",
    "/workers",
    "/breakers",
    "/schedules",
    "/audit",
)


def test_every_page_warns_of_a_redirect(site: Site, db: psycopg.Connection) -> None:
    message_id = put(db)
    assert not [path for path in WARNING_PAGES if "Redirect:" in get(site.ada, path).words]
    db.execute("SELECT pgoutbox.set_redirect('tester@example.org')")
    db.execute(
        "INSERT INTO pgoutbox.worker (name, queues, topics, redirect_to) VALUES ('w:1', '{}', '{}', '@t.example')"
    )
    db.execute("INSERT INTO pgoutbox.blackout VALUES ('2020-01-01', '2199-01-01')")
    site.dashboard.forget()
    for path in (*WARNING_PAGES, f"/messages/{message_id}"):
        page = get(site.ada, path)
        assert "all e-mail is held back, except for exempt addresses and topics" in page.words, path
        assert "redirects it to tester@example.org since" in page.words, path
        assert "PGOUTBOX_REDIRECT_TO=@t.example redirects it when" in page.words, path
        assert "and the blackout 2020-01-01/2199-01-01 forbids that" in page.words, path
        assert re.search(r"since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC", page.words), path


def test_every_page_warns_of_a_copy(site: Site, db: psycopg.Connection) -> None:
    assert not [path for path in WARNING_PAGES if "Copy:" in get(site.ada, path).words]
    db.execute("UPDATE pgoutbox.home SET database_id = 1")
    site.dashboard.forget()
    for path in WARNING_PAGES:
        assert "workers send nothing from this one. pgoutbox doctor" in get(site.ada, path).words, path


def test_an_operator_switches_the_redirect(site: Site, db: psycopg.Connection) -> None:
    form = {"target": "tester@example.org", "duration": "2", "unit": "hours"}
    answer = site.ada.post("/redirect", data=form, follow_redirects=True)
    page = Page(answer.text)
    assert "No worker begins to hand this e-mail over to its real recipients" in page.words
    assert "ada redirects all e-mail to tester@example.org since" in page.words
    assert "All e-mail goes to tester@example.org Switched on by ada" in page.words
    page = Page(site.ada.post("/redirect/off", follow_redirects=True).text)
    assert "The redirect is off. E-mail goes to its real recipients in two seconds" in page.words
    assert "No operator redirects e-mail." in page.words
    assert "/redirect/off" not in page.values("form", "action")
    again = Page(site.ada.post("/redirect/off", follow_redirects=True).text)
    assert "The redirect was not on. E-mail goes to its real recipients." in again.words
    db.execute(
        "INSERT INTO pgoutbox.worker (name, queues, topics, redirect_to) VALUES ('w:1', '{}', '{}', '@t.example')"
    )
    again = Page(site.ada.post("/redirect/off", follow_redirects=True).text)
    assert "The redirect was not on. Workers with PGOUTBOX_REDIRECT_TO, see above, keep their own." in again.words
    assert "PGOUTBOX_REDIRECT_TO=@t.example redirects all e-mail of 1 worker" in again.words
    origin = "web 127.0.0.1"
    assert audit_of(db) == [
        ("ada", origin, "redirect", None, None, {"target": "tester@example.org", "seconds": 7200.0}),
        ("ada", origin, "redirect", None, None, {"target": "none"}),
    ]


def test_an_operator_redirects_some_topics(site: Site, db: psycopg.Connection) -> None:
    form = {"target": "@t.example", "topics": "mail.user.*, mail.a", "exempt_topics": "mail.user.vip"}
    page = Page(site.ada.post("/redirect", data=form, follow_redirects=True).text)
    mail = "e-mail of mail.a, mail.user.* except that of mail.user.vip"
    assert f"ada redirects {mail} to @t.example since" in page.words
    assert f"{mail.capitalize()} goes to @t.example" in page.words
    assert "Check the names: no worker and no message has one of the topics" in page.words
    assert db.execute("SELECT topics, exempt_topics FROM pgoutbox.redirect").fetchall() == [
        (["mail.a", "mail.user.*"], ["mail.user.vip"])
    ]
    put(db, topic="mail.user.welcome")
    page = Page(site.ada.post("/redirect", data=form | {"topics": "mail.user.*"}, follow_redirects=True).text)
    assert "No worker begins to hand this e-mail over to its real recipients" in page.words


def test_a_viewer_sees_the_redirect_and_cannot_switch_it(site: Site, db: psycopg.Connection) -> None:
    db.execute("SELECT pgoutbox.set_redirect('tester@example.org')")
    page = get(site.vera, "/queues")
    assert "All e-mail goes to tester@example.org" in page.words
    assert not [action for action in page.values("form", "action") if "redirect" in action]
    assert site.vera.post("/redirect", data={"target": "eve@example.com"}).status_code == 403
    assert site.vera.post("/redirect/off").status_code == 403
    assert db.execute("SELECT target FROM pgoutbox.redirect").fetchall() == [("tester@example.org",)]


WRONG_REDIRECTS: Final = [
    ({"target": ""}, "target: is empty; give an address, or @ and a domain"),
    ({"target": "tester"}, "target: has no @; give an address, or @ and a domain"),
    ({"target": "a@b.example", "duration": "99999", "unit": "days"}, "duration: at most 3650 days"),
    ({"target": "a@b.example", "topics": "mail.*,Club"}, "topics: &#39;Club&#39; is not a topic"),
    ({"target": "a@b.example", "exempt_topics": "*"}, "exempt_topics: &#39;*&#39; is not a topic"),
]


def test_a_wrong_redirect_is_refused(site: Site, db: psycopg.Connection) -> None:
    for form, error in WRONG_REDIRECTS:
        answer = site.ada.post("/redirect", data=form)
        assert (answer.status_code, error in answer.text) == (422, True), form
    assert db.execute("SELECT count(*) FROM pgoutbox.redirect").fetchone() == (0,)


def test_a_blackout_forbids_to_redirect_by_the_dashboard(site: Site, db: psycopg.Connection) -> None:
    db.execute("INSERT INTO pgoutbox.blackout VALUES ('2020-01-01', '2199-01-01')")
    answer = site.ada.post("/redirect", data={"target": "tester@example.org"})
    assert answer.status_code == 409
    assert "refused within the blackout 2020-01-01/2199-01-01" in answer.text
    assert db.execute("SELECT count(*) FROM pgoutbox.redirect").fetchone() == (0,)
    assert "The blackout 2020-01-01/2199-01-01 forbids to redirect e-mail today." in get(site.ada, "/queues").words


# --- the night on call ------------------------------------------------------------------------------------------------

BREAKER: Final = "smtp:mx.club.org:587"
OPEN_BREAKER: Final = """
    INSERT INTO pgoutbox.breaker (key, opened_at, retry_at, cooldown_seconds, worker, last_error)
    VALUES (%s, now() - interval '3 hours', now() + interval '1 hour', 3600, 'w', 'AUTH: 535 no token=c4n4ry-s3cret')
"""
REPORT_WORKER: Final = "INSERT INTO pgoutbox.worker (name, queues, topics) VALUES ('w', '{default}', '{mail}')"


def test_problems_are_first_on_the_overview_with_their_remedies(site: Site, db: psycopg.Connection) -> None:
    page = get(site.vera, "/")
    assert page.words.index("Problems") < page.words.index("States")
    db.execute(REPORT_WORKER)
    assert "Messages are delivered." in get(reloaded(site).vera, "/").words
    fail_with(db, f"refused: password={CANARY}")
    db.execute(OPEN_BREAKER, [BREAKER])
    put(db, queue="reports")
    db.execute("UPDATE pgoutbox.message SET available_at = now() - interval '1 h' WHERE state = 'pending'")
    words = get(reloaded(site).vera, "/").words
    for told in (
        "problem queue reports: 1 message due",
        "no running worker serves this queue",
        f"the breaker of {BREAKER} has been open",
        f"pgoutbox breaker close {BREAKER}",
        "1 message of mail failed within the last 25 h",
    ):
        assert told in words, told
    assert CANARY not in words


def test_each_problem_is_mended_where_it_is_shown(site: Site, db: psycopg.Connection) -> None:
    db.execute(REPORT_WORKER)
    failed = fail_with(db, "no such mailbox")
    db.execute(OPEN_BREAKER, [BREAKER])
    unheard, paused = put(db, topic="push.notify"), put(db, queue="bulk")
    db.execute("UPDATE pgoutbox.message SET available_at = now() - interval '1 h' WHERE state = 'pending'")
    db.execute("INSERT INTO pgoutbox.queue (name, paused_at) VALUES ('bulk', now())")
    page = get(reloaded(site).ada, "/")
    forms = page.values("form", "action")
    assert {"/queues/bulk/resume", "/breakers/close"} <= set(forms)
    links = [href for href in page.values("a", "href") if href.startswith("/bulk?") or "group=" in href]
    shown = {
        href.partition("&")[0].removeprefix("/bulk?do="): get(site.ada, href)
        for href in links
        if href.startswith("/bulk?")
    }
    assert sorted(shown) == ["cancel", "dismiss", "redrive"]
    assert ids_on(shown["redrive"]) == ids_on(shown["dismiss"]) == [failed]
    assert ids_on(shown["cancel"]) == [unheard]
    assert paused not in ids_on(shown["cancel"])
    viewed = get(reloaded(site).vera, "/")
    assert not {"/queues/bulk/resume", "/breakers/close"} & set(viewed.values("form", "action"))
    assert not [href for href in viewed.values("a", "href") if href.startswith("/bulk?")]


def reloaded(site: Site) -> Site:
    """Return the site without its cached overview."""
    site.dashboard.forget()
    return site


def test_an_operator_closes_a_breaker(site: Site, db: psycopg.Connection) -> None:
    db.execute(OPEN_BREAKER, [BREAKER])
    assert "/breakers/close" in get(site.ada, "/breakers").values("form", "action")
    page = Page(site.ada.post("/breakers/close", data={"key": BREAKER}, follow_redirects=True).text)
    assert "The circuit breaker is closed." in page.words
    assert db.execute("SELECT count(*) FROM pgoutbox.breaker").fetchone() == (0,)
    assert [row[:3] for row in audit_of(db)] == [("ada", "web 127.0.0.1", "breaker")]
    again = Page(site.ada.post("/breakers/close", data={"key": BREAKER}, follow_redirects=True).text)
    assert "The circuit breaker was not open." in again.words
    assert site.ada.post("/breakers/close", data={"key": ""}).status_code == 422


SET_SCHEDULE: Final = """
SELECT pgoutbox.set_schedule(%s, '0 7 * * *', '{"topic": "mail.digest", "payload": 1}', timezone => %s)
"""


def test_schedules_are_shown_with_their_next_times(site: Site, db: psycopg.Connection) -> None:
    assert "There are no schedules." in get(site.vera, "/schedules").words
    db.execute(SET_SCHEDULE, ["digest-7", "Asia/Kolkata"])
    db.execute(SET_SCHEDULE, ["nowhere", "UTC"])
    db.execute("UPDATE pgoutbox.schedule SET problem = 'the time zone is unknown' WHERE name = 'nowhere'")
    page = get(site.vera, "/schedules")
    assert "digest-7 mail.digest 0 7 * * * Asia/Kolkata" in page.words
    assert page.words.count(" 01:30:00") == 5
    assert "nowhere mail.digest 0 7 * * * UTC the time zone is unknown" in page.words
    assert [action for action in page.values("form", "action") if action.startswith("/schedules/")] == []
    assert "digest-7" not in get(site.vera, "/schedules?start=no").words
    for number in range(100):
        db.execute(SET_SCHEDULE, [f"other-{number}", "Asia/Kolkata"])
    page = get(site.vera, "/schedules")
    assert "Shows the next 50 schedules." in page.words
    assert len(page.text) < 100_000


def test_an_operator_pauses_and_runs_a_schedule(site: Site, db: psycopg.Connection) -> None:
    db.execute(SET_SCHEDULE, ["digest-7", "UTC"])
    for act, said in (
        ("pause", "The schedule is paused."),
        ("pause", "or it was in this state already"),
        ("run", "The message of the schedule is enqueued."),
        ("resume", "The schedule goes on with its next time."),
    ):
        page = Page(site.ada.post(f"/schedules/digest-7/{act}", follow_redirects=True).text)
        assert said in page.words
    assert [(row[2], row[0]) for row in audit_of(db)] == [("pause", "ada"), ("run", "ada"), ("resume", "ada")]
    assert db.execute("SELECT topic FROM pgoutbox.message").fetchall() == [("mail.digest",)]
    assert site.vera.post("/schedules/digest-7/pause").status_code == 403
    page = Page(site.ada.post("/schedules/gone/run", follow_redirects=True).text)
    assert "There is no such schedule." in page.words


def test_a_schedule_whose_message_is_refused_runs_with_the_reason(site: Site, db: psycopg.Connection) -> None:
    db.execute(SET_SCHEDULE, ["digest-7", "UTC"])
    db.execute("ALTER TABLE pgoutbox.message ADD CONSTRAINT own CHECK (topic <> 'mail.digest')")
    answer = site.ada.post("/schedules/digest-7/run")
    assert answer.status_code == 409
    words = Page(answer.text).words
    assert "Schedule digest-7: its message is refused: new row for relation" in words
    assert 'violates check constraint "own"' in words
    assert "digest-7 mail.digest 0 7 * * *" in words, "the page of schedules has the notice"
    assert (audit_of(db), db.execute("SELECT count(*) FROM pgoutbox.message").fetchone()) == ([], (0,))


def put_fair(db: psycopg.Connection, key: str, minutes: float) -> None:
    """Put a message of a fair key that has been due for so long."""
    due_earlier(db, enqueue(db, "mail", queue="bulk", fair_key=key), 60 * minutes)


def test_the_page_of_fair_keys_shows_those_that_wait_longest_first(site: Site, db: psycopg.Connection) -> None:
    put(db, queue="bulk")
    assert "/queues/bulk/keys" not in get(site.vera, "/queues?queue=bulk").values("a", "href")
    for key, minutes in (("acme", 5), ("zeta", 180), ("<b>", 1)):
        put_fair(db, key, minutes)
    Operator(db).set_fair_share("bulk", "zeta", weight=3, max_in_flight=0)
    assert "/queues/bulk/keys" in get(site.vera, "/queues?queue=bulk").values("a", "href")
    page = get(site.vera, "/queues/bulk/keys")
    assert "3 of 3 keys those that wait longest first" in page.words
    assert "zeta 1 0 3 h 3 paused none acme 1 0 5 min 1 none none <b> 1 0" in page.words
    assert [form.action for form in page.forms if "share" in form.action] == []
    page = get(site.vera, "/queues/bulk/keys?start=ac")
    assert "1 of 1 key beginning with ac" in page.words
    assert "zeta" not in page.words
    assert "Queue bulk has no fair keys that begin with no." in get(site.vera, "/queues/bulk/keys?start=no").words
    assert site.vera.get("/queues/No%20Queue/keys").status_code == 422


def test_the_page_of_a_message_links_to_its_fair_key(site: Site, db: psycopg.Connection) -> None:
    message_id = enqueue(db, "mail", queue="bulk", fair_key="a&b")
    page = get(site.vera, f"/messages/{message_id}")
    assert "Fair key a&b" in page.words
    assert "/queues/bulk/keys?start=a%26b" in page.values("a", "href")
    assert "Waits: no running worker serves its queue" in page.words
    Operator(db).set_fair_share("bulk", "a&b", max_in_flight=0)
    page = get(site.vera, f"/messages/{message_id}")
    assert "Waits: its fair key a&b is paused (see the key)." in page.words
    assert (
        ids_on(get(site.vera, "/messages?key=a%26b")) == ids_on(get(site.vera, "/messages?text=a%26")) == [message_id]
    )
    Operator(db).set_fair_share("bulk", "a&b")
    db.execute("INSERT INTO pgoutbox.worker (name, queues, topics) VALUES ('w', '{bulk}', '{mail}')")
    page = get(site.vera, f"/messages/{message_id}")
    assert "Waits: it waits for the turn of its fair key (see the key)." in page.words


def test_many_fair_keys_fit_a_page(site: Site, db: psycopg.Connection) -> None:
    db.execute(
        "INSERT INTO pgoutbox.message_live (id, topic, payload, queue, fair_key, lane) SELECT"
        " nextval('pgoutbox.message_id_seq'), 'mail', '1', 'bulk', 'k' || n, 2 FROM generate_series(1, 1000) AS n"
    )
    page = get(site.ada, "/queues/bulk/keys")
    assert "60 of 1,000 keys" in page.words
    assert len(page.text) < 100_000


def test_an_operator_changes_the_share_of_a_key(site: Site, db: psycopg.Connection) -> None:
    put_fair(db, "acme", 5)
    (form,) = [form for form in get(site.ada, "/queues/bulk/keys").forms if form.fields.get("key") == "acme"]
    assert site.vera.post(form.action, data={"key": "acme", "do": "pause"}).status_code == 403
    for given, said in (
        ({"do": "pause"}, "The share applies from the next turn."),
        ({"do": "pause"}, "The share was the same before."),
        ({"do": "set", "weight": "4", "in_flight": "9"}, "acme 1 0 5 min 4 9 none"),
        ({"do": "set", "rate": "1000", "per": "hour"}, "acme 1 0 5 min 4 9 1000/h"),
        ({"do": "max_in_flight"}, "acme 1 0 5 min 4 none 1000/h"),
        ({"do": "rate", "weight": "5"}, "acme 1 0 5 min 5 none none"),
        ({"do": "rate"}, "The share was the same before."),
        ({"do": "reset"}, "acme 1 0 5 min 1 none none"),
        ({"key": "", "do": "set", "weight": "2"}, "acme 1 0 5 min 2 none none"),
    ):
        answer = site.ada.post(form.action, data={**form.fields, "key": "acme", **given}, follow_redirects=True)
        assert said in Page(answer.text).words
    assert [(row[2], row[0]) for row in audit_of(db)] == [
        ("pause", "ada"), ("resume", "ada"), ("limit", "ada"), ("limit", "ada"), ("limit", "ada"), ("limit", "ada"),
        ("limit", "ada"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({}, "weight"),
        ({"weight": "0"}, "weight"),
        ({"weight": "x"}, "weight"),
        ({"in_flight": "1000001"}, "in_flight"),
        ({"in_flight": "-1"}, "in_flight"),
        ({"rate": "0"}, "rate"),
        ({"rate": "1000001"}, "rate"),
        ({"rate": "1e3"}, "rate"),
        ({"rate": "9" * 30}, "rate"),
        ({"rate": "1", "per": "week"}, "per"),
        ({"do": "no"}, "do"),
        ({"key": "k" * 513, "weight": "1"}, "key"),
        ({"key": "\u00e9" * 257, "weight": "1"}, "key"),
        ({"key": "a\0", "weight": "1"}, "key"),
        ({"do": "reset", "weight": "1"}, "weight"),
        ({"do": "pause", "in_flight": "1"}, "in_flight"),
        ({"do": "rate", "rate": "1"}, "rate"),
    ],
)
def test_an_invalid_share_is_refused(site: Site, db: psycopg.Connection, wrong: dict[str, str], field: str) -> None:
    answer = site.ada.post("/queues/bulk/share", data={"key": "acme", "do": "set", **wrong})
    assert answer.status_code == 422
    assert f"{field}: " in Page(answer.text).words.lower()
    assert audit_of(db) == []


@pytest.mark.parametrize("key", [" a ", "o'x\"y", "\u65e5\u672c&<b>", "-x", "k" * 512])
def test_the_forms_of_a_key_change_this_key(site: Site, db: psycopg.Connection, key: str) -> None:
    put_fair(db, key, 5)
    page = get(site.ada, "/queues/bulk/keys")
    (change,) = [href for href in page.values("a", "href") if "start=" in href]
    (pause,) = [form for form in page.forms if form.fields.get("key")]
    assert site.ada.post(pause.action, data={**pause.fields, "do": "pause"}).status_code == 303
    (form,) = [form for form in get(site.ada, change.removesuffix("#change")).forms if "weight" in form.fields]
    answer = site.ada.post(form.action, data={**form.fields, "weight": "7", "do": "set"})
    assert answer.status_code == 303
    assert get(site.ada, answer.headers["location"]).words.count("paused") == 1
    assert db.execute(
        "SELECT fair_key, weight, max_in_flight FROM pgoutbox.fair_share_view WHERE fair_key <> ''"
    ).fetchall() == [(key, 7, 0)]


@pytest.mark.parametrize("key", ["a\nb", "a\rb", "a\u202eb", "\x1b[1m"])
def test_no_form_changes_a_key_that_it_cannot_send(site: Site, db: psycopg.Connection, key: str) -> None:
    """A browser, or the escape of the page, would name another key."""
    put_fair(db, key, 5)
    pages = [get(site.ada, path) for path in ("/queues/bulk/keys", f"/queues/bulk/keys?{urlencode({'start': key})}")]
    for page in pages:
        assert "pgoutbox share" in page.words
        assert [form for form in page.forms if form.fields.get("key")] == []
    assert "weight" not in pages[-1].forms[-1].fields


def wait_for_breaker(db: psycopg.Connection, key: str, **options: str) -> int:
    """Put a message that a breaker has postponed."""
    message_id = put(db, **options)  # type: ignore[arg-type]
    db.execute(
        """
        UPDATE pgoutbox.message
        SET attempt_count = 1,
            lane = 1,
            available_at = now() + interval '1 h',
            last_error = format('circuit breaker %%s is open: no', %s::text),
            attempts = jsonb_build_array(
                (1, 1, 'snoozed', 'w', now(), now(), 'no', NULL, 'circuit_open', %s)::pgoutbox.attempt
            )
        WHERE id = %s
        """,
        [key, key, message_id],
    )
    return message_id


def test_a_message_behind_a_silent_receiver_does_not_say_that_its_breaker_is_open(
    site: Site, db: psycopg.Connection
) -> None:
    silent = wait_for_breaker(db, BREAKER)
    db.execute("UPDATE pgoutbox.message SET attempts = jsonb_set(attempts, '{0,reason_code}', '\"stalled\"')")
    assert "All circuit breakers are closed." in get(site.vera, "/breakers").words
    reason = "an open circuit breaker holds it back, or its receiver took no message at its last attempt"
    assert f"Waits: {reason} (see the breakers)" in get(site.vera, f"/messages/{silent}").words


def test_the_error_of_an_earlier_attempt_is_named_as_such_beside_sent(site: Site, db: psycopg.Connection) -> None:
    sent, failed = put(db, State.SENT), put(db, State.FAILED)
    for message_id, heading in ((sent, "Error of an earlier attempt"), (failed, "Last error")):
        words = get(site.vera, f"/messages/{message_id}").words
        assert f"{heading} Copy the last error no such mailbox" in words


def test_a_breaker_links_to_the_messages_that_wait_for_it(site: Site, db: psycopg.Connection) -> None:
    db.execute(OPEN_BREAKER, [BREAKER])
    db.execute(OPEN_BREAKER, ["https://api.example.org"])
    waiting = [wait_for_breaker(db, BREAKER), wait_for_breaker(db, BREAKER, queue="bulk", ordering_key="o")]
    db.execute("UPDATE pgoutbox.message SET available_at = now() - interval '1 s' WHERE id = %s", [waiting[0]])
    wait_for_breaker(db, "https://other.example.org")
    put(db)
    page = get(site.vera, "/breakers")
    assert f"{BREAKER} 2 messages that wait for {BREAKER} 3 h ago in 59 min" in page.words
    assert "https://api.example.org 0 " in page.words
    (path,) = [href for href in page.values("a", "href") if "breaker=" in href]
    behind = get(site.vera, path)
    assert ids_on(behind) == waiting[::-1]
    assert f"Shows only messages behind the open breaker {BREAKER}." in behind.words
    assert ("breaker", BREAKER) in behind.forms[0].fields.items(), "a further search keeps the breaker"
    assert site.ada.post("/breakers/close", data={"key": BREAKER}).status_code == 303
    assert ids_on(get(site.vera, path)) == [], "nothing waits behind a closed breaker"


def hold(db: psycopg.Connection, key: str, *holds: str) -> None:
    """Open a breaker with these holds."""
    db.execute(OPEN_BREAKER, [key])
    db.execute("UPDATE pgoutbox.breaker SET holds = %s WHERE key = %s", [list(holds), key])


def test_a_breaker_links_to_messages_that_wait_for_it_unclaimed(site: Site, db: psycopg.Connection) -> None:
    hold(db, BREAKER, "mail mail.digest mailto")
    held = [put(db, queue="mail", topic="mail.digest", destination="mailto:ada@example.org") for _ in range(2)]
    put(db, topic="other")
    page = get(site.vera, "/breakers")
    assert f"{BREAKER} 2 messages that wait for {BREAKER}" in page.words
    (path,) = [href for href in page.values("a", "href") if "breaker=" in href]
    assert ids_on(get(site.vera, path)) == held[::-1], "the key is in none of their texts"


def test_a_count_without_a_message_is_unknown_if_it_is_capped(
    site: Site, db: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    db.execute(OPEN_BREAKER, [BREAKER])
    put(db)
    monkeypatch.setitem(reads.EACH_QUEUE, "queues", 1)
    words = get(site.vera, "/breakers").words
    assert f"{BREAKER} unknown " in words
    assert "0+" not in words


def test_each_of_many_breakers_has_its_own_messages(site: Site, db: psycopg.Connection) -> None:
    db.execute(
        """
        INSERT INTO pgoutbox.breaker (key, retry_at, cooldown_seconds, worker, last_error, holds)
        SELECT key, now() + interval '1 h', 60, 'w', 'no', ARRAY['hooks hook.send ' || key]
        FROM generate_series(1, 1000) AS n, LATERAL (SELECT format('https://h%s.example.org', n)) AS breaker(key)
        """
    )
    db.execute(
        """
        INSERT INTO pgoutbox.message (topic, queue, destination, payload)
        SELECT 'hook.send', 'hooks', format('https://h%s.example.org/x', 1 + n % 1000), '{}'
        FROM generate_series(1, 9000) AS n
        """
    )
    page = get(site.vera, "/breakers")
    assert "https://h1.example.org 9 messages that wait" in page.words
    (path,) = [href for href in page.values("a", "href") if "%2Fh1.example.org" in href]
    assert len(ids_on(get(site.vera, path))) == 9


def test_the_messages_behind_a_breaker_are_counted_up_to_a_limit(
    site: Site, db: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    db.execute(OPEN_BREAKER, [BREAKER])
    for _ in range(21):
        wait_for_breaker(db, BREAKER)
    assert f"{BREAKER} 21 messages" in get(site.vera, "/breakers").words
    monkeypatch.setitem(reads.EACH_QUEUE, "rows", 2)
    assert f"{BREAKER} 20+ messages" in get(site.vera, "/breakers").words, "there may be more than were counted"


def test_many_messages_of_one_queue_do_not_hide_those_behind_a_breaker(
    site: Site, db: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(reads.EACH_QUEUE, "rows", 2)
    db.execute(OPEN_BREAKER, [BREAKER])
    wait_for_breaker(db, BREAKER)
    for _ in range(30):
        put(db, queue="a-large-one")
    assert f"{BREAKER} 1+ messages" in get(site.vera, "/breakers").words


def test_numbers_of_topics_and_breakers_say_if_further_queues_were_not_counted(
    site: Site, db: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    for queue in ("a", "b", "c"):
        put(db, topic="mail", queue=queue)
    wait_for_breaker(db, BREAKER, queue="a")
    db.execute(OPEN_BREAKER, [BREAKER])
    assert "mail 4 waiting" in get(site.vera, "/topics").words
    assert f"{BREAKER} 1 message that waits" in get(site.vera, "/breakers").words
    monkeypatch.setitem(reads.EACH_QUEUE, "queues", 2)
    site.dashboard.forget()
    assert "mail 3+ waiting" in get(site.vera, "/topics").words
    assert f"{BREAKER} 1+ messages" in get(site.vera, "/breakers").words


def test_queues_behind_one_breaker_are_one_finding_with_one_button(site: Site, db: psycopg.Connection) -> None:
    hold(db, BREAKER, "bulk mail mailto", "default mail mailto")
    for queue in ("bulk", "default"):
        put(db, queue=queue, destination="mailto:ada@example.org")
    db.execute("UPDATE pgoutbox.message SET available_at = now() - interval '1 h'")
    page = get(site.ada, "/")
    assert f"2 queues: 2 messages due, the oldest for 60 min: they wait behind the breaker of {BREAKER}" in page.words
    assert page.values("form", "action").count("/breakers/close") == 1
    for queue in ("bulk", "default"):
        assert f"behind the breaker of {BREAKER}" in get(site.vera, f"/queues?queue={queue}").words


def test_the_overview_names_a_handler_that_the_application_lacks(
    dsn: str, open_site: Callable[..., Site], db: psycopg.Connection
) -> None:
    put(db, topic="push")
    db.execute("UPDATE pgoutbox.message SET available_at = now() - interval '1 h'")
    assert "pgoutbox worker --queue" in get(open_site(dsn).vera, "/").words, "nobody knows the application"
    words = get(open_site(dsn, topics_app.outbox).vera, "/").words
    assert "1 message is not delivered: topic push has no handler." in words
    assert "pgoutbox worker --queue" not in words


def test_a_finding_about_a_queue_without_a_page_links_to_its_messages(site: Site, db: psycopg.Connection) -> None:
    message_id = put(db, age=timedelta(hours=1))
    db.execute("UPDATE pgoutbox.message SET queue = 'CAPS/and?more', available_at = now() - interval '1 h'")
    (path,) = {href for href in get(site.vera, "/").values("a", "href") if "CAPS" in href and "topic=" not in href}
    assert ids_on(get(site.vera, path)) == [message_id]


def test_the_overview_links_to_the_open_breakers(site: Site, db: psycopg.Connection) -> None:
    assert "open breaker" not in get(site.vera, "/").words
    for key in (BREAKER, "https://api.example.org"):
        db.execute(OPEN_BREAKER, [key])
    page = get(reloaded(site).vera, "/")
    assert "2 open breakers" in page.words
    # The navigation for wide and for narrow screens, each finding of the doctor, and the number.
    assert page.values("a", "href").count("/breakers") == 5


def test_the_page_of_workers_shows_their_slots_and_messages(site: Site, db: psycopg.Connection) -> None:
    assert "No worker runs." in get(site.vera, "/workers").words
    db.execute(
        "INSERT INTO pgoutbox.worker (name, queues, topics, version, slots, started_at)"
        " VALUES ('w', '{default,bulk}', '{mail}', '1.2.3', 50, now() - interval '3 h'),"
        " ('idle', '{default}', '{mail}', NULL, NULL, now())"
    )
    first, second = put(db, State.SENDING), put(db, State.SENDING, queue="bulk")
    put(db)
    page = get(site.vera, "/workers")
    assert "w 1.2.3 default, bulk mail 2 with 50 slots" in page.words
    assert "3 h ago just now 2 in flight at w" in page.words
    assert ids_on(page) == [first, second], "the longest attempt leads to its message"
    assert "idle - default mail 0 - just now just now none" in page.words


def test_the_charts_mark_the_starts_and_the_ends_of_workers(site: Site, db: psycopg.Connection) -> None:
    db.execute(
        "INSERT INTO pgoutbox.worker (name, queues, topics, version, started_at, seen_at, stopped_at) VALUES"
        " ('old:1', '{default}', '{mail}', '1.2.3', now() - interval '50 min', now(), now() - interval '5 min'),"
        " ('killed:1', '{default}', '{mail}', '1.2.3', now() - interval '40 min', now() - interval '10 min', NULL),"
        " ('new:1', '{default}', '{mail}', '1.2.4', now() - interval '4 min', now(), NULL)"
    )
    words = get(site.vera, "/").words
    for mark in ("old:1 started, version 1.2.3", "old:1 stopped", "killed:1 lost", "new:1 started, version 1.2.4"):
        assert f"UTC: worker {mark} " in words


def test_the_page_of_workers_shows_a_worker_that_holds_messages_and_does_not_report(
    site: Site, db: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reads, "_RUNNING", 2)
    held = [put(db, State.SENDING) for _ in range(3)]
    page = get(site.vera, "/workers")
    assert "w does not report - default - 3" in page.words
    assert ids_on(page) == held[:2]
    assert "/messages?state=sending" in page.values("a", "href")


def test_the_queues_that_need_a_look_are_first(
    site: Site, db: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, count in (("a-idle", 0), ("b-few", 1), ("c-many", 3), ("d-late", 1)):
        Operator(db).pause(name)
        for _ in range(count):
            put(db, queue=name)
    db.execute("UPDATE pgoutbox.message SET available_at = now() - interval '1 min' WHERE queue = 'c-many'")
    db.execute("UPDATE pgoutbox.message SET available_at = now() - interval '2 min' WHERE queue = 'd-late'")
    page = get(site.vera, "/queues")
    assert page.values("tr", "id") == ["queue-d-late", "queue-c-many", "queue-b-few", "queue-a-idle"]
    assert "4 queues" in page.words
    monkeypatch.setattr(reads, "PAGE_ROWS", 2)
    page = get(site.vera, "/queues")
    assert page.values("tr", "id") == ["queue-d-late", "queue-c-many"]
    assert "2 of 4 queues" in page.words
    page = get(site.vera, "/queues?start=b-")
    assert page.values("tr", "id") == ["queue-b-few"]
    assert "1 queue whose name begins with b-" in page.words
    assert "No queue with messages, a pause or limits has a name" in get(site.vera, "/queues?start=b%25").words
    monkeypatch.setattr(reads, "QUEUE_NAMES", 3)
    assert "2 of 3+ queues" in get(site.vera, "/queues").words


def test_a_queue_shows_its_workers_and_when_it_will_be_empty(
    site: Site, db: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    db.execute("INSERT INTO pgoutbox.worker (name, queues, topics) VALUES ('w', '{bulk}', '{mail}')")
    db.execute(
        "INSERT INTO pgoutbox.worker (name, queues, topics, ended_at) VALUES ('cron', '{bulk}', '{mail}', now())"
    )
    for _ in range(10):
        put(db, State.SENT, queue="bulk")
    put(db, State.SENT, queue="bulk", age=timedelta(minutes=6))
    for _ in range(4):
        put(db, queue="bulk")
    put(db, queue="other")
    page = get(site.vera, "/queues")
    assert re.search(r"bulk 4 due messages of bulk \S+ ms 0 0 1 2 per min 2 min no limit", page.words), page.words
    assert re.search(r"other 1 due message of other \S+ ms 0 0 none - - no limit", page.words), page.words
    monkeypatch.setattr(reads, "QUEUE_CAP", 3)
    assert "over 2 min" in get(site.vera, "/queues").words
    # Messages that are read first tell the rate if there are too many.
    monkeypatch.setattr(reads, "_RATE_ROWS", 5)
    assert "300 per min" in get(site.vera, "/queues").words


def test_a_paused_queue_is_resumed_from_the_list_and_others_are_changed_on_their_pages(
    site: Site, db: psycopg.Connection
) -> None:
    put(db, queue="bulk")
    db.execute("UPDATE pgoutbox.message SET available_at = now() - interval '1 h'")
    Operator(db).pause("mail")
    listed = get(site.ada, "/queues")
    assert "/queues?queue=bulk#change" in listed.values("a", "href")
    assert [form.action for form in listed.forms if form.action.startswith("/queues/")] == ["/queues/mail/resume"]
    page = get(site.ada, "/queues?queue=bulk")
    assert "change" in page.values("section", "id")
    assert {f"/queues/bulk/{act}" for act in ("pause", "rate", "in-flight")} <= set(page.values("form", "action"))
    assert "no worker is running" in page.words
    assert "/queues?queue=bulk" not in page.values("a", "href"), "a link to the page itself has no effect"
    viewed = get(site.vera, "/queues")
    assert "/queues?queue=bulk#change" not in viewed.values("a", "href")
    assert "/queues/mail/resume" not in viewed.values("form", "action")


def test_a_failed_message_that_halts_its_key_is_redriven_from_the_first_screen(
    site: Site, db: psycopg.Connection
) -> None:
    failed = put(db, State.FAILED, ordering_key="room-7")
    put(db, ordering_key="room-7")
    db.execute("UPDATE pgoutbox.message SET halts_key = true WHERE id = %s", [failed])
    db.execute("UPDATE pgoutbox.message SET available_at = now() - interval '1 h' WHERE state = 'pending'")
    (form,) = [form for form in get(site.ada, "/").forms if form.action.endswith("/redrive")]
    assert site.ada.post(form.action, data=form.fields).status_code == 303
    assert state_of(db, failed) == "pending"
    assert not [form for form in get(reloaded(site).vera, "/").forms if form.action.endswith("/redrive")]


def lines_of(page: Page) -> dict[str, int]:
    """Return the labels of the small lines of a page, with the number of points of each."""
    labels = [attributes["title"] or "" for _, attributes in page.elements if attributes.get("role") == "img"]
    return dict(zip(labels, [len((points or "").split()) for points in page.values("polyline", "points")], strict=True))


def test_each_queue_and_topic_has_a_line_of_its_ended_messages(
    site: Site, db: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "_BUDGET_SECONDS", PROCESS_PATIENCE_SECONDS)
    for state, age in ((State.SENT, 30), (State.SENT, 30), (State.FAILED, 10), (State.SENT, 90)):
        put(db, state, queue="bulk", topic="mail.bulk", age=timedelta(minutes=age))
    put(db, queue="bulk", topic="mail.bulk")
    put(db, queue="idle", topic="mail.idle")
    db.execute("UPDATE pgoutbox.message SET created_at = least(created_at, finished_at)")
    for path in ("/queues", "/topics", "/topics?topic=mail.bulk"):
        ended, live = "3 ended in the last hour, at most 2 in 3 minutes", "1 live now, at most 1 in the last hour"
        assert lines_of(get(site.vera, path)) == {ended: 20, live: 22}, path
    put(db, State.SENT, queue="bulk", topic="mail.bulk")
    assert len(lines_of(get(reloaded(site).vera, "/queues"))) == 2, "the current slot is not over"


def test_each_queue_and_topic_has_a_line_of_its_depth(
    site: Site, db: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "_BUDGET_SECONDS", PROCESS_PATIENCE_SECONDS)
    sent = [put(db, State.SENT, queue="bulk", topic="mail.bulk", age=timedelta(minutes=10)) for _ in range(3)]
    waiting = put(db, queue="bulk", topic="mail.bulk")
    failed = put(db, State.FAILED, queue="bulk", topic="mail.bulk", age=timedelta(minutes=10))
    put(db, State.SENT, queue="other", topic="mail.other", age=timedelta(minutes=10))
    age = "UPDATE pgoutbox.message SET created_at = now() - make_interval(mins => %s) WHERE id = ANY (%s)"
    db.execute(age, [40, [*sent[:2], failed]])
    db.execute(age, [180, sent[2:]])
    db.execute(age, [20, [waiting]])
    for path in ("/queues?start=bulk", "/topics?start=mail.bulk", "/topics?topic=mail.bulk"):
        page = get(site.vera, path)
        assert lines_of(page)["1 live now, at most 5 in the last hour"] == 22, path
    points = get(site.vera, "/topics?topic=mail.bulk").values("polyline", "points")[0] or ""
    heights = [5 - float(point.split(",")[1]) for point in points.split()]
    assert [height for height, _ in itertools.groupby(heights)] == [1, 4, 5, 1]
    # A failed message that is pending again counts as live all the time.
    Operator(db).redrive(failed)
    assert "2 live now, at most 5 in the last hour" in lines_of(get(reloaded(site).vera, "/topics?topic=mail.bulk"))
    # Of a depth that is counted up to a cap, the line shows the changes.
    monkeypatch.setattr(reads, "QUEUE_CAP", 2)
    ids = [put(db, queue="deep") for _ in range(4)]
    db.execute(age, [20, ids])
    page = get(reloaded(site).vera, "/queues?start=deep")
    assert lines_of(page) == {"at least 2 live now, by time in the last hour": 22}
    assert {point.split(",")[1] for point in (page.values("polyline", "points")[0] or "").split()} == {"4", "0"}
    assert [(box or "").split()[3] for box in page.values("svg", "viewbox")] == ["4"], "the line is inside its box"
    # More live messages than are counted, all of this moment: an older depth is not known.
    monkeypatch.setattr(reads, "DEPTH_CAP", 10)
    enqueue = "SELECT pgoutbox.enqueue_many(jsonb_agg(jsonb_build_object('topic', 'mail.bulk', 'payload', n))) FROM"
    db.execute(f"{enqueue} generate_series(1, 10) AS n")
    assert not [label for label in lines_of(get(reloaded(site).vera, "/queues?start=default")) if "live" in label]


def test_a_line_begins_at_the_first_time_that_is_counted(
    site: Site, db: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "_BUDGET_SECONDS", 0)
    for minutes in (7, 55):
        put(db, State.SENT, queue="bulk", age=timedelta(minutes=minutes))
    put(db, queue="bulk")
    while not (found := {label: n for label, n in lines_of(get(site.vera, "/queues")).items() if "ended" in label}):
        site.dashboard.forget()
    ((label, points),) = found.items()
    assert re.fullmatch(r"1 ended since \d\d:\d\d UTC, at most 1 in 3 minutes", label), label
    assert points < 20


def test_pages_of_many_queues_and_topics_stay_small(
    site: Site, db: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "_BUDGET_SECONDS", PROCESS_PATIENCE_SECONDS)
    db.execute(
        """
        INSERT INTO pgoutbox.message (topic, queue, payload, available_at, attempt_count, lane, last_error)
        SELECT
            'topic.of-a-team.' || n % 2000, 'queue.of-a-team.' || n, '{}', now() - interval '1 h', 1, 1, repeat('x', 90)
        FROM generate_series(1, 5000) AS n
        """
    )
    db.execute(
        """
        INSERT INTO pgoutbox.message (
            topic, queue, payload, state, attempt_count, worker, created_at, available_at, claimed_at, finished_at
        )
        SELECT
            'topic.of-a-team.' || n % 2000, 'queue.of-a-team.' || n % 5000, '{}', 'sent', 1, 'w',
            at - interval '8 minutes', at, at, at
        FROM generate_series(1, 100000) AS n, LATERAL (SELECT now() - n * interval '30 ms') AS ended(at)
        """
    )
    db.execute("UPDATE pgoutbox.message SET created_at = now() - interval '1 day' WHERE state = 'pending'")
    db.execute("VACUUM ANALYZE pgoutbox.message")
    for path in ("/queues", "/topics"):
        text = site.ada.get(path).text
        assert text.count("<polyline") == 2 * reads.PAGE_ROWS, path
        assert len(text.encode()) < 100 * 1024, path


@pytest.mark.parametrize(
    "path", ["/", "/queues", "/queues?queue=bulk", "/topics", "/topics?topic=mail", "/messages?state=pending"]
)
def test_the_parts_of_a_page_share_one_ranking_of_the_queues(
    site: Site, db: psycopg.Connection, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """It walks along the names of thousands of queues, which takes longer than the rest of a part."""
    put(db, queue="bulk", topic="mail")
    rankings: list[str] = []
    rank_queues, ask = reads.rank_queues, DoctorContext.ask

    def asking(
        context: DoctorContext, statement: LiteralString, parameters: Mapping[str, object] | None = None
    ) -> list[DictRow]:
        rankings.extend(["doctor"] if statement == sql.RANK_QUEUES else [])
        return ask(context, statement, parameters)

    def ranking(connection: psycopg.Connection, **options: str) -> list[RankedQueue]:
        rankings.append("page")
        return rank_queues(connection, **options)

    monkeypatch.setattr(DoctorContext, "ask", asking)
    monkeypatch.setattr(reads, "rank_queues", ranking)
    get(reloaded(site).vera, path)
    assert rankings == ["page"]


def test_pages_are_small_beside_workers_and_acts_with_thousands_of_names(site: Site, db: psycopg.Connection) -> None:
    db.execute(
        "INSERT INTO pgoutbox.worker (name, queues, topics) SELECT 'host-' || w, q.names, t.names"
        " FROM generate_series(1, 8) AS w,"
        " (SELECT array_agg('tenant-' || q) AS names FROM generate_series(1, 5000) AS q) AS q,"
        " (SELECT array_agg('tenant.' || t) AS names FROM generate_series(1, 2000) AS t) AS t"
    )
    db.execute(
        "INSERT INTO pgoutbox.audit (act_id, message_count, actor, action, message_ids, stated)"
        " SELECT gen_random_uuid(), 500, 'ada', 'redrive', i.ids, jsonb_build_object('reason', repeat('because ', 900))"
        " FROM generate_series(1, 60), (SELECT array_agg(i) AS ids FROM generate_series(1, 500) AS i) AS i"
    )
    db.execute(
        "INSERT INTO pgoutbox.breaker (key, retry_at, cooldown_seconds, worker, last_error)"
        " SELECT 'https:' || n || '.tenant.example.org:443', now(), 60, 'w', repeat('refused ', 20)"
        " FROM generate_series(1, 300) AS n"
    )
    for path in ("/", "/workers", "/audit", "/breakers"):
        assert len(site.ada.get(path).content) < 100 * 1024, path
    page = get(site.ada, "/workers")
    assert "tenant-20 and 4,980 more" in page.words
    assert "tenant.20 and 1,980 more" in page.words


def test_an_hour_that_takes_too_long_to_count_is_left_out(
    site: Site, db: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(db, State.SENT)
    with monkeypatch.context() as patient:
        patient.setattr(history, "_BUDGET_SECONDS", PROCESS_PATIENCE_SECONDS)
        patient.setattr(history, "_MINUTE_SECONDS", PROCESS_PATIENCE_SECONDS)
        assert "Still counting" not in get(site.vera, "/").words
    site.dashboard.forget()
    monkeypatch.setattr(history, "_MINUTE_SECONDS", 0.1)
    monkeypatch.setattr(sql, "SENT_BY_TIME", "SELECT now(), 1, 1 FROM pg_sleep(600)")
    assert "Still counting" in get(site.vera, "/").words


def test_a_preview_names_the_cause_of_its_group(site: Site, db: psycopg.Connection) -> None:
    put(db, State.FAILED)
    db.execute("UPDATE pgoutbox.message SET last_error = 'no row 17', topic = 'mail'")
    ((group,),) = db.execute("SELECT f.error_group FROM pgoutbox.failures() AS f").fetchall()
    page = get(site.ada, f"/bulk?do=redrive&state=failed&topic=mail&group={group}")
    assert "Cause: no row #" in page.words
    assert "Cause:" not in get(site.ada, "/bulk?do=redrive&state=failed&topic=mail&group=" + "0" * 12).words


def test_the_depth_of_a_queue_is_charted(site: Site, db: psycopg.Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four messages that wait for 50 minutes two end 20 minutes ago, one of them as failed."""
    monkeypatch.setattr(history, "_BUDGET_SECONDS", PROCESS_PATIENCE_SECONDS)
    for state in (State.SENT, State.FAILED, State.PENDING, State.SENDING):
        put(db, state, queue="bulk", age=timedelta(minutes=20))
    put(db, State.SENT, age=timedelta(minutes=20))
    db.execute("UPDATE pgoutbox.message SET created_at = now() - interval '50 min'")
    (label,) = get(site.vera, "/queues?queue=bulk").values("svg", "aria-label")
    assert label == "2 messages now, at most 4 in 1h"
    db.execute("UPDATE pgoutbox.message SET created_at = now() - interval '3 days'")
    (label,) = get(site.vera, "/queues?queue=bulk").values("svg", "aria-label")
    assert label == "2 messages now, at most 4 in 1h"


def test_the_depth_is_exact_at_each_time(db: psycopg.Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages that ended while counting stopped are in no count."""
    monkeypatch.setattr(history, "_BUDGET_SECONDS", PROCESS_PATIENCE_SECONDS)
    hour = history.RANGES["1h"]
    for state, age in ((State.SENT, 40), (State.CANCELLED, 20), (State.SENT, 5)):
        put(db, state, age=timedelta(minutes=age))
    put(db)
    db.execute("UPDATE pgoutbox.message SET created_at = now() - interval '45 min' WHERE state = 'sent'")
    db.execute("UPDATE pgoutbox.message SET created_at = now() - interval '25 min' WHERE state <> 'sent'")
    with db.transaction():
        now = reads.now(db)
        known = history.History().depth(db, now, hour, "default", 10)
    ages = {round((now - at).total_seconds() / 60): count for at, count in known.items()}
    assert {ages[minutes] for minutes in range(46, 60)} == {0}
    assert {ages[minutes] for minutes in range(41, 45)} == {2}
    assert {ages[minutes] for minutes in range(26, 40)} == {1}
    assert {ages[minutes] for minutes in range(21, 25)} == {3}
    assert {ages[minutes] for minutes in range(6, 20)} == {2}
    assert {ages[minutes] for minutes in range(5)} == {1}


def test_the_depth_begins_where_the_time_to_count_ends(db: psycopg.Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "_BUDGET_SECONDS", 0)
    for minutes in (0, 300):
        put(db, State.SENT, age=timedelta(minutes=minutes))
    put(db)
    db.execute("UPDATE pgoutbox.message SET created_at = now() - interval '2 d'")
    with db.transaction():
        now = reads.now(db)
        known = history.History().depth(db, now, history.RANGES["24h"], "default", 10)
    assert now - min(known) < timedelta(minutes=31)
    assert known[now] == 1
    assert {count for at, count in known.items() if at != now} <= {2}


def test_a_viewer_sees_a_breaker_and_cannot_close_it(site: Site, db: psycopg.Connection) -> None:
    db.execute(OPEN_BREAKER, [BREAKER])
    page = get(site.vera, "/breakers")
    assert BREAKER in page.words
    assert "/breakers/close" not in page.values("form", "action")
    assert site.vera.post("/breakers/close", data={"key": BREAKER}).status_code == 403
    assert db.execute("SELECT count(*) FROM pgoutbox.breaker").fetchone() == (1,)


@pytest.mark.parametrize(
    ("prepare", "told"),
    [
        ("SELECT 1", "Waits: no running worker serves its queue; pgoutbox workers lists the queues (see the workers)."),
        (REPORT_WORKER, "Waits: it is due, and the next free slot of a worker takes it."),
        (
            REPORT_WORKER.replace("{mail}", "{sms}"),
            "Waits: no running worker of its queue has a handler for its topic; pgoutbox workers lists",
        ),
        (
            "INSERT INTO pgoutbox.queue (name, paused_at) VALUES ('default', now())",
            "Waits: its queue or its topic is paused (see the queue and the topic).",
        ),
    ],
)
def test_the_page_of_a_message_says_why_it_waits(
    site: Site, db: psycopg.Connection, prepare: LiteralString, told: str
) -> None:
    db.execute(prepare)
    assert told in get(site.vera, f"/messages/{put(db)}").words


def test_a_waiting_message_links_to_the_one_that_it_waits_for(site: Site, db: psycopg.Connection) -> None:
    first, second = put(db, ordering_key="o"), put(db, ordering_key="o")
    page = get(site.vera, f"/messages/{second}")
    assert f"Waits: an earlier message of its ordering key is delivered first (message {first})." in page.words
    assert f"/messages/{first}" in page.values("a", "href")
    assert "Waits:" not in get(site.vera, f"/messages/{put(db, State.SENT)}").words


def test_every_reason_to_wait_has_words() -> None:
    view = Path(__file__).parents[2] / "migrations/sql/views/waiting_view.sql"
    reasons = set(re.findall(r"(?:THEN|ELSE) '([a-z_ ]+)'", view.read_text(encoding="utf-8")))
    # The view shows the other reasons of attempts as they are. A suppressed message does not wait.
    reasons |= set(ReasonCode) - {ReasonCode.CIRCUIT_OPEN, ReasonCode.STALLED, ReasonCode.SUPPRESSED}
    assert {"due", "no worker", "breaker", "in order"} <= reasons
    assert reasons == WAITS.keys()
