"""In a bad night a person finds each fault and ends it, in the dashboard alone and by the command line alone."""

from __future__ import annotations

import re
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final

import httpx
import psycopg
import pytest

from pgoutbox.dashboard import create_app
from pgoutbox.doctor import Level, examine_delivery
from pgoutbox.doctor.runner import FINDING_PROBLEMS
from tests.support import night
from tests.support.command_line import clean_environment, cli, cli_anywhere
from tests.support.html_page import Page
from tests.support.outbox_actions import state_of
from tests.support.waiting import PROCESS_PATIENCE_SECONDS, wait_until
from tests.support.web_server import OPERATOR_TOKEN, HostServers, web_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.command_line import Done

__all__ = ["clean_environment", "cli", "cli_anywhere"]

pytestmark = pytest.mark.slow

BACKLOG: Final = 24_000
"""More late messages than any statement reads of one queue."""

CAUSES: Final = {
    "due-behind-breaker": night.BREAKER,
    "due-paused": "reports",
    "due-in-unserved-queue": "newsletter",
    "due-without-handler": "push.notify",
    "due-behind-failed": "bookings",
    "due-rate-limited": "sms",
}


class Browser:
    """A person with a browser without scripts: pages, links and forms, and the number of clicks."""

    def __init__(self, client: httpx.Client) -> None:
        self._client = client
        self.page = Page("")
        self.clicks = 0

    def open(self, path: str = "/") -> Page:
        """Open a page from the address bar."""
        answer = self._client.get(path, follow_redirects=True)
        assert answer.status_code == 200, answer.text
        self.page = Page(answer.text)
        return self.page

    def follow(self, pattern: str) -> Page:
        """Click the first link to this path."""
        self.clicks += 1
        return self.open(next(href for href in self.page.values("a", "href") if re.search(pattern, href)))

    def press(self, action: str, **filled: str) -> Page:
        """Press the button of the first form with this action."""
        self.clicks += 1
        form = next(form for form in self.page.forms if re.search(action, form.action))
        answer = self._client.post(form.action, data=form.fields | filled, follow_redirects=True)
        assert answer.status_code == 200, answer.text
        self.page = Page(answer.text)
        return self.page


@pytest.fixture
def halting(db: psycopg.Connection) -> int:
    """Store the night, and return the failed booking."""
    return night.fill(db, BACKLOG)


@pytest.fixture
def browser(dsn: str) -> Iterator[Browser]:
    with ExitStack() as stack:
        settings = web_settings(dsn=dsn)
        app = create_app(settings, settings=settings)
        stack.callback(app.state.dashboard.close)
        url = stack.enter_context(HostServers(stack).serving(app))
        headers = {"Authorization": f"Bearer {OPERATOR_TOKEN}", "Accept": "text/html"}
        client = httpx.Client(base_url=url, timeout=PROCESS_PATIENCE_SECONDS, headers=headers)
        yield Browser(stack.enter_context(client))


def waiting(db: psycopg.Connection, queue: str, reason: str) -> int:
    """Return how many messages of a queue wait for this reason."""
    query = "SELECT count(*) FROM pgoutbox.waiting_view AS w WHERE w.queue = %s AND w.reason = %s"
    ((count,),) = db.execute(query, [queue, reason]).fetchall()
    return int(count)


def test_ten_readings_name_the_same_causes_with_the_same_numbers(
    halting: int, cli: Callable[..., Done], browser: Browser
) -> None:
    readings: list[list[tuple[str, str]]] = []
    for _ in range(5):
        lines = cli("doctor", "--json").lines
        readings.append([(line["code"], line["what"]) for line in lines if line["code"] in CAUSES])
        words = browser.open().words
        readings.append([(code, what) for code, what in readings[-1] if what in words])
    assert {code for code, _ in readings[0]} == {*CAUSES}
    for code, what in readings[0]:
        assert CAUSES[code] in what, what
    assert all(reading == readings[0] for reading in readings)


def test_the_header_counts_the_problems_of_the_overview(halting: int, db: psycopg.Connection, dsn: str) -> None:
    """It runs only the checks that can find a problem."""
    settings = web_settings(dsn=dsn)
    problems = [found for found in examine_delivery(db, settings) if found.level is Level.PROBLEM]
    assert len(problems) >= 3
    assert examine_delivery(db, settings, checks=FINDING_PROBLEMS)[: len(problems)] == problems


def test_each_fault_is_found_and_ended_in_the_dashboard_alone(
    db: psycopg.Connection, halting: int, browser: Browser
) -> None:
    clicks: dict[str, int] = {}

    def after(what: str) -> None:
        clicks[what], browser.clicks = browser.clicks, 0

    browser.open()
    browser.press(r"/breakers/close|/breaker")
    assert waiting(db, "mail", "breaker") == 0
    after("mail server")

    browser.open()
    browser.press(r"/queues/reports/resume")
    assert waiting(db, "reports", "paused") == 0
    after("paused queue")

    browser.open()
    browser.follow(rf"/messages/{halting}$")
    browser.press(rf"/messages/{halting}/dismiss", reason="the guest has another room")
    assert (state_of(db, halting), waiting(db, "bookings", "halted")) == ("skipped", 0)
    after("halted key")

    browser.open()
    browser.follow(r"/queues\?queue=sms")
    browser.press(r"/queues/sms/rate", unlimited="1")
    assert waiting(db, "sms", "rate") == 0
    after("rate limit")

    browser.open()
    browser.follow(r"/bulk\?do=cancel&.*topic=push\.notify")
    browser.press(r"/bulk")
    wait_until(lambda: waiting(db, "default", "no handler") == 0, lambda: "the messages are cancelled")
    after("topic without handler")

    page = browser.open()
    assert "pgoutbox worker --queue newsletter" in page.words
    browser.follow(r"/queues\?queue=newsletter")
    assert "no running worker serves" in browser.page.words
    after("queue without worker")

    browser.open()
    browser.follow(r"/bulk\?do=redrive&.*group=")
    browser.press(r"/bulk")
    left = "SELECT count(*) FROM pgoutbox.message_failed"
    wait_until(lambda: db.execute(left).fetchone() != (500,), lambda: "the group is pending")
    after("failures")
    assert clicks == {
        "mail server": 1,
        "paused queue": 1,
        "halted key": 2,
        "rate limit": 2,
        "topic without handler": 2,
        "queue without worker": 1,
        "failures": 2,
    }


def test_each_fault_is_found_and_ended_by_the_command_line_alone(
    db: psycopg.Connection, halting: int, cli: Callable[..., Done]
) -> None:
    told = cli("doctor").out
    assert f"pgoutbox breaker close {night.BREAKER}" in told
    assert cli("breaker", "close", night.BREAKER).exit_code == 0
    assert waiting(db, "mail", "breaker") == 0
    assert "pgoutbox resume reports" in told
    assert cli("resume", "reports").exit_code == 0
    assert waiting(db, "reports", "paused") == 0
    assert f"pgoutbox dismiss {halting} --reason" in told
    assert cli("dismiss", halting, "--reason", "the guest has another room").exit_code == 0
    assert waiting(db, "bookings", "halted") == 0
    assert "pgoutbox limit sms --rate none" in told
    assert cli("limit", "sms", "--rate", "none", "--yes").exit_code == 0
    assert waiting(db, "sms", "rate") == 0
    assert "pgoutbox cancel --all --topic push.notify" in told
    assert cli("cancel", "--all", "--topic", "push.notify", "--yes").exit_code == 0
    assert waiting(db, "default", "no handler") == 0
    assert "pgoutbox worker --queue newsletter" in told
    (group, *_) = re.findall(r"pgoutbox redrive --group (\w+)", told)
    assert cli("redrive", "--group", group, "--yes").exit_code == 0
    assert db.execute("SELECT count(*) < 500 FROM pgoutbox.message_failed").fetchall() == [(True,)]
