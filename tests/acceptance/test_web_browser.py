"""Tests the dashboard in Chromium: with the keyboard alone, without scripts, in dark mode, on a phone, and with
hostile rows in its tables.
"""

from __future__ import annotations

import re
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import combinations
from typing import TYPE_CHECKING, Final
from urllib.parse import parse_qsl, quote, urlencode, urljoin, urlsplit

import psycopg
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect

from pgoutbox.dashboard import create_app
from pgoutbox.dashboard.access import Access
from pgoutbox.message import State
from pgoutbox.operations import Operator
from tests.support import night, topics_app
from tests.support.browsers import COLOR_SCHEMES, SIZES
from tests.support.messages import CLAIM_ALL, put
from tests.support.shop import PAGES, fill
from tests.support.waiting import wait_until
from tests.support.web_server import OPERATOR_TOKEN, VIEWER_TOKEN, HostServers, web_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Dialog, Page, Request

    from pgoutbox import Outbox
    from pgoutbox.dashboard.dashboard import Dashboard
    from tests.conftest import Server

pytestmark = pytest.mark.slow


@dataclass
class Watch:
    """The problems that a browser must not report."""

    host: str
    complaints: list[str] = field(default_factory=list)

    def over(self, context: BrowserContext) -> None:
        """Record the errors of this context's pages, and their requests to other hosts."""
        context.on("console", self._heed)
        context.on("weberror", lambda error: self.complaints.append(f"error: {error.error}"))
        context.on("dialog", self._dismiss)
        context.on("request", self._check)

    def _dismiss(self, dialog: Dialog) -> None:
        self.complaints.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def _heed(self, message: ConsoleMessage) -> None:
        # The page itself shows a refusal, so its status is not an error.
        if message.type in ("error", "warning") and "the server responded with a status of 4" not in message.text:
            self.complaints.append(f"{message.type}: {message.text}")

    def _check(self, request: Request) -> None:
        parts = urlsplit(request.url)
        if parts.scheme not in ("http", "data", "about") or (parts.scheme == "http" and parts.netloc != self.host):
            self.complaints.append(f"request: {request.url}")


@dataclass
class Site:
    """A served dashboard, the database behind it, and browsers in front of it."""

    url: str
    db: psycopg.Connection
    browser: Browser
    stack: ExitStack
    watch: Watch
    dashboard: Dashboard

    def visit(
        self, *, token: str | None = OPERATOR_TOKEN, scripts: bool = True, wide: bool = True, zone: str | None = None
    ) -> Page:
        """Open a page in a new browser context, signed in if there is a token."""
        width, height = SIZES["wide" if wide else "phone"]
        context = self.browser.new_context(
            base_url=self.url,
            java_script_enabled=scripts,
            viewport={"width": width, "height": height},
            has_touch=not wide,
            reduced_motion="reduce",
            timezone_id=zone,
            permissions=["clipboard-read", "clipboard-write"],
        )
        self.stack.callback(context.close)
        self.watch.over(context)
        page = context.new_page()
        page.goto("/")
        if token is not None:
            page.get_by_label("Token").fill(token)
            page.get_by_role("button", name="Sign in").click()
            expect(page.get_by_role("heading", name="Overview")).to_be_visible()
        return page

    def state_of(self, message_id: int) -> str:
        ((state,),) = self.db.execute("SELECT state FROM pgoutbox.message WHERE id = %s", (message_id,)).fetchall()
        return str(state)


@pytest.fixture(scope="module")
def hosts() -> Iterator[HostServers]:
    with ExitStack() as opened:
        yield HostServers(opened)


@pytest.fixture
def site(dsn: str, browser: Browser, hosts: HostServers) -> Iterator[Site]:
    """Serve a dashboard over a new database."""
    yield from open_site(dsn, browser, hosts)


def open_site(dsn: str, browser: Browser, hosts: HostServers, outbox: Outbox | None = None) -> Iterator[Site]:
    """Serve a dashboard. Problems that the browser reported fail the test at its end."""
    with ExitStack() as stack:
        settings = web_settings(dsn=dsn)
        app = create_app(outbox or settings, settings=settings, access=Access.from_settings(settings))
        stack.callback(app.state.dashboard.close)
        url = stack.enter_context(hosts.serving(app))
        db = stack.enter_context(psycopg.connect(dsn, autocommit=True))
        visits = stack.enter_context(ExitStack())
        opened = Site(url, db, browser, visits, Watch(urlsplit(url).netloc), app.state.dashboard)
        yield opened
    assert opened.watch.complaints == []


@pytest.fixture
def site_with_topics(dsn: str, browser: Browser, hosts: HostServers) -> Iterator[Site]:
    """Serve a dashboard that knows the topics of an application."""
    yield from open_site(dsn, browser, hosts, topics_app.outbox)


@pytest.fixture(scope="module")
def shop_dsn(server: Server, template_of_today: Callable[[], str]) -> Iterator[str]:
    """Return the DSN of a database with an hour of a shop's traffic, for reading only."""
    with server.database(template=template_of_today()) as database:
        dsn = server.dsn_for(database)
        with psycopg.connect(dsn) as connection:
            fill(connection)
        yield dsn


@pytest.fixture
def shop(shop_dsn: str, browser: Browser, hosts: HostServers) -> Iterator[Site]:
    """Serve a dashboard over it."""
    yield from open_site(shop_dsn, browser, hosts)


# --- accessibility ----------------------------------------------------------------------------------------------------

REFUSALS: Final = ("/messages/999999", "/messages?limit=x")


def violations(page: Page, *rules: str) -> list[str]:
    """Return axe's findings on the current page, by these rules or by all."""
    only = {"runOnly": {"type": "rule", "values": list(rules)}} if rules else {}
    if not page.evaluate("'axe' in window"):
        page.evaluate(Axe().axe_script)
    results = page.evaluate("(options) => axe.run(options)", {"resultTypes": ["violations"], **only})
    return [
        f"{page.url} {found['impact']} {found['id']}: {node['target']} {node['failureSummary']}"
        for found in results["violations"]
        for node in found["nodes"]
    ]


def found_in_every_way(page: Page) -> Iterator[str]:
    """Return axe's findings in light and dark mode, on wide and narrow screens. In dark mode only the colours are
    checked."""
    for size, (width, height) in SIZES.items():
        page.set_viewport_size({"width": width, "height": height})
        for scheme in COLOR_SCHEMES:
            page.emulate_media(color_scheme=scheme)
            for found in violations(page, *(["color-contrast"] if scheme == "dark" else [])):
                yield f"{scheme} {size}: {found}"
        if page.evaluate("document.documentElement.scrollWidth > innerWidth"):
            yield f"{size}: {page.url} is wider than the screen"


def test_axe_finds_no_problem_in_light_or_dark_mode_on_wide_or_narrow_screens(shop: Site) -> None:
    page = shop.visit(token=None)
    page.goto("/login")
    found = list(found_in_every_way(page))
    page = shop.visit()
    destination = "/messages?destination=https://shop3.example.org/hook&limit=10"
    for path in (*PAGES.values(), destination, *REFUSALS):
        page.goto(path)
        found += found_in_every_way(page)
    assert found == []


def test_axe_detects_a_problem(shop: Site) -> None:
    page = shop.visit()
    page.evaluate("document.querySelector('main').innerHTML += '<input><p id=states style=\"color:#eee\">pale</p>'")
    assert {line.split()[2] for line in violations(page)} >= {"label:"}
    shop.watch.complaints.clear()  # The content security policy forbids this style.


# --- with the keyboard alone ------------------------------------------------------------------------------------------

FOCUSED: Final = """() => {
    const at = document.activeElement, style = getComputedStyle(at), box = at.getBoundingClientRect();
    const visible = style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2 && box.width > 0;
    const named = at.getAttribute("aria-label") || at.innerText || at.labels?.[0]?.innerText || at.value || "";
    return {name: named.replace(/\\s+/g, " ").trim(), tag: at.tagName, visible};
}"""


def tab_to(page: Page, name: str, *, most: int = 80) -> list[str]:
    """Press Tab until this element has the focus, and return the elements on the way. Each must be visible and have
    a name."""
    page.wait_for_load_state()  # A heading can be visible before the style sheet has arrived.
    met: list[str] = []
    while not met or met[-1] != name:
        assert len(met) < most, f"{name!r} is not among {met}"
        page.keyboard.press("Tab")
        at = page.evaluate(FOCUSED)
        assert at["visible"], f"the focus on {at} is not visible"
        assert at["name"], f"{at} has no name"
        met.append(at["name"])
    return met


def test_a_group_is_redriven_with_the_keyboard_alone(site: Site) -> None:
    failed = [put(site.db, State.FAILED) for _ in range(3)]
    page = site.visit(token=None)
    page.keyboard.press("Tab")
    assert page.evaluate(FOCUSED)["name"] == "Skip to the content"
    tab_to(page, "Token")
    page.keyboard.type(OPERATOR_TOKEN)
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Overview")).to_be_visible()

    way = tab_to(page, "Failed")
    assert way == ["Skip to the content", "Overview", "Messages", "Failed"]
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Failed", level=1)).to_be_visible()

    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    way = tab_to(page, "Redrive all failed messages…")
    assert "Overview" not in way
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Redrive messages")).to_be_visible()
    expect(page.get_by_text("3 messages match")).to_be_visible()
    assert [site.state_of(message) for message in failed] == ["failed"] * 3

    tab_to(page, "Redrive messages")
    page.keyboard.press("Enter")
    expect(page.get_by_text("Done.")).to_be_visible()
    assert [site.state_of(message) for message in failed] == ["pending"] * 3


def test_two_selected_messages_are_redriven_with_the_keyboard_alone(site: Site) -> None:
    failed = [put(site.db, State.FAILED) for _ in range(4)]
    page = site.visit()
    page.goto("/messages")
    tab_to(page, f"Select message {failed[2]}")
    page.keyboard.press("Space")
    tab_to(page, f"Select message {failed[0]}")
    page.keyboard.press("Space")
    # The buttons are above the rows.
    for _ in range(80):
        page.keyboard.press("Shift+Tab")
        if page.evaluate(FOCUSED)["name"] == "Redrive… the selected messages":
            break
    page.keyboard.press("Enter")
    expect(page.get_by_text("2 messages match.")).to_be_visible()
    tab_to(page, "Redrive messages")
    page.keyboard.press("Enter")
    expect(page.get_by_text("Done.")).to_be_visible()
    states = ["pending", "failed", "pending", "failed"]
    assert [site.state_of(message_id) for message_id in failed] == states


def test_a_message_is_enqueued_with_the_keyboard_alone(site_with_topics: Site) -> None:
    site = site_with_topics
    page = site.visit()
    tab_to(page, "Topics")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Topics", level=1)).to_be_visible()
    tab_to(page, "mail.welcome")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Topic mail.welcome", level=1)).to_be_visible()
    tab_to(page, "Enqueue… a message of mail.welcome")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Enqueue a message")).to_be_visible()
    payload = page.get_by_label("Payload")
    expect(payload).to_have_value(re.compile('"email": "ada@example.org"'))

    payload.focus()
    page.keyboard.press("Control+A")
    page.keyboard.type('{"user_id": 0, "email": "ada@example.org"}')
    tab_to(page, "Enqueue")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("payload.user_id: does not fit Welcome")
    expect(payload).to_have_value('{"user_id": 0, "email": "ada@example.org"}')
    expect(payload).to_be_focused()
    assert list(found_in_every_way(page)) == []

    page.keyboard.press("Control+A")
    page.keyboard.type('{"user_id": 7, "email": "ada@example.org"}')
    tab_to(page, "Enqueue")
    page.keyboard.press("Enter")
    expect(page.get_by_role("status").filter(has_text="The message is enqueued.")).to_be_visible()
    expect(page.get_by_role("main")).to_contain_text("mailto:ada@example.org")
    acts = site.db.execute("SELECT actor, action, details ->> 'topic' FROM pgoutbox.audit").fetchall()
    assert acts == [("ada", "enqueue", "mail.welcome")]


def test_a_topic_is_chosen_and_enqueued_without_scripts(site_with_topics: Site) -> None:
    page = site_with_topics.visit(scripts=False)
    page.goto("/enqueue")
    page.get_by_role("combobox", name="Topic").select_option("search.index")
    press(page, "Choose")
    page.get_by_label("Payload").fill('{"id": 7}')
    page.get_by_label("Owner").fill("user-7")
    page.get_by_label("Number").fill("2")
    page.get_by_label("Unit").select_option("hours")
    press(page, "Enqueue")
    expect(page.get_by_role("main")).to_contain_text("The message is enqueued.")
    row = site_with_topics.db.execute(
        "SELECT payload, owner, available_at - created_at FROM pgoutbox.message"
    ).fetchone()
    assert row == ({"id": 7}, "user-7", timedelta(hours=2))


def test_axe_finds_no_problem_on_the_pages_of_topics(site_with_topics: Site) -> None:
    put(site_with_topics.db, State.FAILED, topic="mail.unheard.of")
    page = site_with_topics.visit()
    found: list[str] = []
    for path in (
        "/topics",
        "/topics?topic=search.index",
        "/topics?topic=mail.unheard.of",
        "/enqueue",
        "/enqueue?topic=search.index",
        "/messages?topic=mail.unheard.of",
        "/bulk?do=dismiss&ids=1",
    ):
        page.goto(path)
        found += found_in_every_way(page)
    assert found == []


@pytest.mark.parametrize(
    ("state", "summary", "label", "text", "action", "becomes"),
    [
        (State.FAILED, "Correct", "Destination", "tel:2", "correct", "pending"),
        (State.FAILED, "Dismiss", "Reason", "mailbox closed", "dismiss", "skipped"),
        (State.PENDING, "Deliver at another time", "Due", "2030-01-31T12:00:30", "reschedule", "pending"),
    ],
)
def test_a_refresh_keeps_an_open_form_which_works_with_the_keyboard(
    site: Site, state: State, summary: str, label: str, text: str, action: str, becomes: str
) -> None:
    message_id = put(site.db, state)
    page = site.visit()
    page.goto(f"/messages/{message_id}")
    tab_to(page, summary)
    page.keyboard.press("Enter")
    field = page.get_by_label(label)
    field.fill(text)
    page.evaluate("document.activeElement.blur()")
    site.db.execute("UPDATE pgoutbox.message SET owner = 'changed meanwhile' WHERE id = %s", [message_id])
    put(site.db)  # The page learns of new messages, and reads its own again.
    expect(page.get_by_role("status")).to_have_text("Paused while in use", timeout=30_000)
    expect(field).to_have_value(text)
    field.press("Enter")
    expect(page.get_by_role("main")).to_contain_text("changed meanwhile")
    assert site.state_of(message_id) == becomes
    assert site.db.execute("SELECT action FROM pgoutbox.audit ORDER BY id DESC").fetchone() == (action,)


def test_a_refresh_keeps_selected_messages(site: Site) -> None:
    message_id = put(site.db, State.FAILED)
    page = site.visit()
    page.goto("/messages")
    box = page.get_by_role("checkbox", name=f"Select message {message_id}")
    box.check()
    page.evaluate("document.activeElement.blur()")
    put(site.db, State.FAILED, topic="mail.unheard.of")
    expect(page.get_by_role("status")).to_have_text("Paused while in use", timeout=30_000)
    expect(box).to_be_checked()
    box.uncheck()
    page.evaluate("document.activeElement.blur()")
    expect(page.get_by_role("main")).to_contain_text("mail.unheard.of", timeout=30_000)


# --- times and copies -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scripts", "shown"), [(True, "2025-12-31 21:00:00 GMT+9"), (False, "2025-12-31 12:00:00 UTC")]
)
def test_times_are_local_with_scripts_and_utc_without(site: Site, scripts: bool, shown: str) -> None:
    message_id = put(site.db)
    site.db.execute("UPDATE pgoutbox.message SET created_at = '2025-12-31 12:00Z'")
    site.db.execute("SELECT pgoutbox.set_redirect('tester@example.org')")
    site.db.execute("UPDATE pgoutbox.redirect SET set_at = '2025-12-31 12:00Z'")
    site.dashboard.forget()
    page = site.visit(scripts=scripts, zone="Asia/Tokyo")
    page.goto(f"/messages/{message_id}")
    expect(page.locator("dt", has_text="Enqueued").locator("xpath=..")).to_contain_text(shown)
    expect(page.locator("#redirects")).to_contain_text(f"since {shown}. Details")
    page.goto("/messages")
    title = page.get_by_role("row").filter(has_text="mail").locator("time").first
    expect(title).to_have_attribute("title", re.compile(re.escape(shown)))


def test_a_refresh_leaves_a_part_with_local_times_alone(site: Site) -> None:
    message_id = put(site.db, State.SENT, age=timedelta(days=3))
    long_ago = "created_at = '2025-12-31 12:00Z', available_at = '2025-12-31 12:00Z', claimed_at = '2025-12-31 12:00Z'"
    site.db.execute(f"UPDATE pgoutbox.message SET {long_ago}".encode())
    page = site.visit(token=VIEWER_TOKEN, zone="Asia/Tokyo")
    page.goto(f"/messages/{message_id}")
    page.evaluate("document.getElementById('message').firstElementChild.marked = true")
    for _ in range(2):  # The second refresh begins after the end of the first one.
        with page.expect_response(re.compile(f"/messages/{message_id}")):
            put(site.db)
    assert page.evaluate("document.getElementById('message').firstElementChild.marked") is True


def test_texts_are_copied_with_scripts_and_no_button_is_shown_without(site: Site) -> None:
    message_id = put(site.db, State.FAILED, dedupe_key="order-7")
    page = site.visit()
    page.goto(f"/messages/{message_id}")
    for name, text in (
        ("the id", str(message_id)),
        ("the dedupe key", "order-7"),
        ("the last error", "no such mailbox"),
        ("the payload", '{\n  "to": "ada"\n}'),
    ):
        page.get_by_role("button", name=f"Copy {name}").click()
        expect(page.locator(".copy.done").last).to_be_visible()
        assert page.evaluate("navigator.clipboard.readText()") == text
    page = site.visit(scripts=False)
    page.goto(f"/messages/{message_id}")
    expect(page.get_by_role("button", name=re.compile("Copy"))).to_have_count(0)


# --- on a phone -------------------------------------------------------------------------------------------------------

CUT_OFF: Final = """() => [...document.querySelectorAll("main :not(input, textarea)")].filter((element) => {
    const box = element.getBoundingClientRect();
    // A list cuts its texts to one line each.
    const isSeen = box.width > 1 && box.height > 1 && !element.closest(".visually-hidden, .cut");
    return isSeen && (box.left < 0 || box.right > innerWidth || element.clientWidth + 1 < element.scrollWidth);
}).map((element) => `${element.tagName} ${element.className} ${element.textContent.slice(0, 60)}`)"""
LONG: Final = "https://shop.example.org/" + "a-very-long-path" * 10


def test_nothing_is_cut_off_on_a_phone(site_with_topics: Site) -> None:
    site = site_with_topics
    failed = put(site.db, State.FAILED, topic="mail.unheard.of", destination=LONG, dedupe_key=LONG)
    site.db.execute("UPDATE pgoutbox.message SET last_error = %s", [LONG])
    Operator(site.db, actor=LONG[:100], origin=LONG[:100]).redrive(failed)
    site.db.execute("UPDATE pgoutbox.message SET state = 'failed', finished_at = now()")
    put(site.db, ordering_key="o")
    page = site.visit(wide=False, zone="Asia/Tokyo")
    topic = "/topics?topic=mail.unheard.of"
    paths = ("/messages", f"/messages/{failed}", "/audit", "/topics", topic, f"/bulk?do=dismiss&ids={failed}")
    for path in (*paths, "/enqueue?topic=mail.loose"):
        page.goto(path)
        assert page.evaluate(CUT_OFF) == [], path
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, path


def test_the_states_are_folded_on_a_phone_only(site: Site) -> None:
    page = site.visit()
    states = page.get_by_role("navigation", name="States")
    for size, (width, height) in SIZES.items():
        page.set_viewport_size({"width": width, "height": height})
        page.goto("/messages?state=failed")
        expect(states).to_be_visible(visible=size == "wide")
    page.locator("#states summary").click()
    states.get_by_role("link", name="sent").click()
    expect(page.locator("#states summary")).to_contain_text("Sent")


def test_more_fields_are_open_if_one_is_set(site: Site) -> None:
    page = site.visit(wide=False)
    for path, is_open in (
        ("/messages", False),
        ("/messages?state=failed&topic=mail", False),
        ("/messages?key=k", True),
    ):
        page.goto(path)
        expect(page.locator('[name="key"]')).to_be_visible(visible=is_open)
    page.goto("/messages?topic=mail")
    page.get_by_text("More fields", exact=True).click()
    expect(page.get_by_label("Topic")).to_have_value("mail")
    page.locator('[name="key"]').fill("k")
    press(page, "Find")
    expect(page.get_by_label("Topic")).to_have_value("mail")
    expect(page.locator('[name="key"]')).to_have_value("k")


@pytest.mark.parametrize("scripts", [True, False])
def test_acts_come_with_a_selection(site: Site, scripts: bool) -> None:
    message_id = put(site.db, State.FAILED)
    page = site.visit(scripts=scripts)
    page.goto("/messages?state=failed")
    selected = page.get_by_role("button", name="Redrive… the selected messages")
    matching = page.get_by_role("link", name="Redrive… all matching messages")
    box, every = page.get_by_label(f"Select message {message_id}"), page.get_by_label("All matching messages")
    expect(selected).to_be_hidden()
    expect(matching).to_be_hidden()
    box.check()
    expect(selected).to_be_visible()
    expect(matching).to_be_hidden()
    every.check()
    expect(selected).to_be_hidden()
    expect(matching).to_be_visible()


# --- without scripts --------------------------------------------------------------------------------------------------


def press(page: Page, name: str) -> None:
    """Press the button of this name, and wait for the response."""
    page.get_by_role("button", name=name, exact=True).click()
    page.wait_for_load_state()


def test_every_act_works_without_scripts_and_records_its_actor(site: Site) -> None:
    db = site.db
    failed, sent, pending = put(db, State.FAILED), put(db, State.SENT), put(db)
    page = site.visit(scripts=False)

    page.goto(f"/messages/{failed}")
    press(page, "Redrive")
    assert site.state_of(failed) == "pending"
    page.goto(f"/messages/{sent}")
    press(page, "Resend")
    assert db.execute("SELECT count(*) FROM pgoutbox.message WHERE resend_of = %s", (sent,)).fetchall() == [(1,)]
    page.goto(f"/messages/{pending}")
    press(page, "Cancel")
    assert site.state_of(pending) == "cancelled"

    page.goto("/queues")
    page.get_by_role("link", name="Change… default", exact=True).click()
    press(page, "Pause default")
    page.goto("/queues")
    press(page, "Resume default")
    page.get_by_role("form", name="Rate of default").get_by_label("Rate").fill("20")
    press(page, "Limit the rate of default")
    page.get_by_role("form", name="In flight of default").get_by_label("In flight").fill("7")
    press(page, "Limit messages in flight of default")
    limits = "SELECT paused_at, rate_count, max_in_flight FROM pgoutbox.queue WHERE name = 'default'"
    assert db.execute(limits).fetchall() == [(None, 20, 7)]

    page.goto("/messages?state=pending")
    page.get_by_label("All matching messages").check()
    page.get_by_role("link", name="Cancel… all matching messages").click()
    press(page, "Cancel messages")
    wait_until(lambda: site.state_of(failed) == "cancelled", lambda: "the bulk cancels the owed message")

    acts = db.execute("SELECT actor, origin, action FROM pgoutbox.audit ORDER BY id").fetchall()
    actions = ["redrive", "resend", "cancel", "pause", "resume", "limit", "limit", "cancel"]
    assert acts == [("ada", "web 127.0.0.1", action) for action in actions]
    page.goto("/audit")
    expect(page.get_by_role("row").filter(has_text="ada")).to_have_count(len(actions))

    press(page, "Sign out")
    page.goto("/messages")
    expect(page.get_by_role("heading", name="Sign in")).to_be_visible()


def test_the_message_search_works_without_scripts(site: Site) -> None:
    put(site.db, topic="mail.welcome", destination="mailto:ada@example.org")
    put(site.db, topic="mail.receipt", destination="mailto:grace@example.org")
    page = site.visit(token=VIEWER_TOKEN, scripts=False)
    page.get_by_role("link", name="Messages", exact=True).click()
    page.get_by_text("More fields", exact=True).click()
    page.get_by_label("Topic").fill("mail.receipt")
    press(page, "Find")
    found = page.locator("#found")
    expect(found).to_contain_text("grace@example.org")
    expect(found).not_to_contain_text("ada@example.org")


OPEN_BREAKER: Final = """
    INSERT INTO pgoutbox.breaker (key, retry_at, cooldown_seconds, worker, last_error)
    VALUES ('smtp:mx.example.org', now() + interval '1 h', 60, 'w', 'refused')
"""


def test_each_act_is_reachable_on_a_phone_without_scripts(site: Site) -> None:
    put(site.db, State.FAILED)
    put(site.db)
    site.db.execute(OPEN_BREAKER)
    page = site.visit(scripts=False, wide=False)
    for menu, heading, button in (
        ("Queues", "Queues", "Pause default"),
        ("Breakers", "Circuit breakers", "Close the breaker of smtp:mx.example.org"),
        ("Failed", "Failed", "Dismiss… this group of mail"),
    ):
        page.get_by_text("Menu", exact=True).click()
        page.get_by_label("Pages").get_by_role("link", name=menu).click()
        expect(page.get_by_role("heading", name=heading, exact=True)).to_be_visible()
        if menu == "Queues":
            page.get_by_role("link", name="Change… default", exact=True).click()
        box = page.get_by_role("link" if menu == "Failed" else "button", name=button, exact=True).bounding_box()
        assert box is not None
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= SIZES["phone"][0], f"{button} is cut off"
    page.get_by_role("link", name="Dismiss… this group of mail", exact=True).click()
    expect(page.get_by_role("heading", name="Dismiss messages")).to_be_visible()


def test_the_header_leaves_room_for_the_page(site: Site) -> None:
    """In a bad night, with its numbers: one line on a wide screen, two on a phone."""
    night.fill(site.db, 1_000)
    for wide, lines in ((True, 1), (False, 2)):
        page = site.visit(wide=wide)
        for path in ("/", "/messages", "/queues?queue=mail", "/breakers"):
            page.goto(path)
            expect(page.locator("#totals")).to_contain_text("501 failed")
            expect(page.get_by_role("status").first).to_have_text("Live")
            tops = page.locator(
                "header .brand, header > .wide-only, header > .menu, header .totals, header .who"
            ).evaluate_all(
                "all => all.filter(one => one.offsetHeight).map(one => one.offsetTop + one.offsetHeight / 2)"
            )
            assert len({round(top / 20) for top in tops}) == lines, (path, tops)


def test_the_cells_of_a_row_have_one_ground_line(site: Site) -> None:
    night.fill(site.db, 1_000)
    page = site.visit()
    for path in ("/failed", "/queues", "/breakers"):
        page.goto(path)
        for row in page.locator("tbody tr").all():
            bottoms = row.locator("> *").evaluate_all("all => all.map(one => one.getBoundingClientRect().bottom)")
            assert max(bottoms) - min(bottoms) < 1, (path, bottoms)


def test_an_open_list_of_messages_stays_open_while_the_page_updates(site: Site) -> None:
    first = put(site.db, State.SENDING)
    page = site.visit(token=VIEWER_TOKEN)
    page.goto("/workers")
    expect(page.get_by_role("status")).to_have_text("Live")
    page.locator("main").get_by_text("1 in flight").click()
    expect(page.get_by_role("link", name=str(first), exact=True)).to_be_visible()
    page.evaluate("document.activeElement.blur()")
    second = put(site.db, State.SENDING)
    expect(page.get_by_role("link", name=str(second), exact=True)).to_be_visible(timeout=30_000)


def test_a_viewer_sees_no_actions(site: Site) -> None:
    failed, pending = put(site.db, State.FAILED), put(site.db)
    page = site.visit(token=VIEWER_TOKEN)
    site.db.execute(OPEN_BREAKER)
    paths = [f"/messages/{failed}", f"/messages/{pending}", "/failed", "/queues", "/queues?queue=default", "/breakers"]
    for path in (*paths, "/messages"):
        page.goto(path)
        offered = set(page.get_by_role("button").all_inner_texts())
        assert {name for name in offered if not name.startswith("Copy")} <= {"Sign out", "Find"}
        assert "…" not in " ".join(page.get_by_role("link").all_inner_texts())


# --- live -------------------------------------------------------------------------------------------------------------


def test_changes_appear_without_a_reload(site: Site) -> None:
    """Three tabs follow the same changes."""
    page = site.visit(token=VIEWER_TOKEN)
    tabs = [page, page.context.new_page(), page.context.new_page()]
    for tab, path in zip(tabs, ("/", "/messages", "/failed"), strict=True):
        tab.goto(path)
        expect(tab.get_by_role("status").filter(has_text="Live")).to_be_visible()
        tab.evaluate("window.loadedOnce = true")
    put(site.db, State.FAILED, topic="mail.unheard.of")
    for tab in tabs:
        expect(tab.get_by_role("main")).to_contain_text("mail.unheard.of", timeout=30_000)
        assert tab.evaluate("window.loadedOnce") is True


def test_a_page_signed_out_elsewhere_says_so_and_stops_updating(site: Site) -> None:
    page = site.visit()
    page.goto("/messages")
    expect(page.get_by_role("status").filter(has_text="Live")).to_be_visible()
    other = page.context.new_page()
    other.goto("/")
    other.get_by_role("button", name="Sign out").click()
    expect(other.get_by_role("heading", name="Sign in")).to_be_visible()
    put(site.db, topic="mail.unheard.of")
    expect(page.get_by_role("status").filter(has_text="Signed out")).to_be_visible(timeout=40_000)
    expect(page.get_by_role("main")).not_to_contain_text("mail.unheard.of")


def test_a_part_of_the_page_in_use_pauses_while_the_others_update(site: Site) -> None:
    page = site.visit(token=VIEWER_TOKEN)
    expect(page.get_by_role("status")).to_have_text("Live")
    page.locator("#part-states").get_by_role("link", name="failed").focus()
    put(site.db, State.FAILED, topic="mail.unheard.of")
    expect(page.get_by_role("status")).to_have_text("Paused while in use", timeout=30_000)
    expect(page.locator("#part-failures")).to_contain_text("mail.unheard.of")
    expect(page.locator("#part-states").get_by_role("link", name="failed")).to_contain_text("0")
    page.evaluate("document.activeElement.blur()")
    expect(page.get_by_role("status")).to_have_text("Live", timeout=30_000)
    expect(page.locator("#part-states").get_by_role("link", name="failed")).to_contain_text("1")


def test_the_eighth_tab_of_one_browser_loads(site: Site) -> None:
    """A browser opens six connections to one server."""
    page = site.visit(token=VIEWER_TOKEN)
    tabs = [page]
    for _ in range(7):
        tabs.append(page.context.new_page())
        tabs[-1].goto("/")
        expect(tabs[-1].get_by_role("status")).to_have_text("Live")
    for followed in tabs[-4:]:
        expect(followed.get_by_role("status")).to_have_text("Live")
    expect(tabs[0].get_by_role("status")).to_have_text("Every 20 s")
    assert site.dashboard.feed.followers == 4


def test_a_hidden_tab_holds_no_connection_and_resumes_when_visible(site: Site) -> None:
    page = site.visit(token=VIEWER_TOKEN)
    expect(page.get_by_role("status")).to_have_text("Live")
    # A headless browser never hides a tab.
    hide = "(hidden) => { Object.defineProperty(document, 'hidden', {value: hidden, configurable: true}); "
    hide += "document.dispatchEvent(new Event('visibilitychange')); }"
    page.evaluate(hide, True)
    wait_until(lambda: site.dashboard.feed.followers == 0, lambda: "the hidden tab still follows")
    put(site.db, State.FAILED, topic="mail.unheard.of")
    page.evaluate(hide, False)
    expect(page.get_by_role("main")).to_contain_text("mail.unheard.of", timeout=30_000)
    assert site.dashboard.feed.followers == 1


# --- attackers --------------------------------------------------------------------------------------------------------

MARK: Final = "h0stile"
ATTACKS: Final = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "' autofocus onfocus='alert(1)",
    "javascript:alert(1)//",
    "data:text/html,<script>alert(1)</script>",
    "</script><svg/onload=alert(1)>",
    "</title></textarea></pre><iframe src=//evil.example></iframe>",
    "<base href=//evil.example/><meta http-equiv=refresh content=0;url=//evil.example>",
    "<form action=//evil.example><button formaction=//evil.example>",
    "<link rel=stylesheet href=//evil.example><style>*{display:none}</style>",
    "{{ 7 * 7 }}{% raw %}${7*7}<%= 7*7 %>",
    "&lt;script&gt;alert(1)&#x3c;/script&#x3e;",
    "\u2028alert(1)\u2029\u202e<b>\u2066",
    "--><!--]]><![CDATA[<x onclick=alert(1)>",
    "%3Cscript%3Ealert(1)%3C/script%3E/../../?a=b&state=sent#x",
    "\r\nSet-Cookie: a=b\r\n\r\n<script>alert(1)</script>",
)

# Few texts with several attacks each: every text has pages of its own.
HOSTILE_TEXTS: Final = [f"{MARK}{n} {' '.join(ATTACKS[n::5])}" for n in range(5)]

HOSTILE_MESSAGE: Final = """
    INSERT INTO pgoutbox.message (
        topic, queue, destination, coalesce_key, dedupe_key, ordering_key, worker, last_error, skip_reason,
        payload, headers, state, key_in_flight, attempt_count, lane, claimed_at, finished_at
    ) VALUES (
        %(text)s, %(text)s, %(text)s, %(text)s, %(text)s, %(text)s, %(text)s, %(text)s,
        CASE WHEN %(state)s = 'skipped' THEN %(text)s END,
        jsonb_build_object(%(text)s::text, %(text)s::text), jsonb_build_object(%(text)s::text, %(text)s::text),
        %(state)s, CASE WHEN %(state)s = 'sending' THEN %(text)s END, 1, 1, now(),
        CASE WHEN %(state)s NOT IN ('pending', 'sending') THEN now() END
    )
"""
HOSTILE_ROWS: Final = """
    WITH attempt AS (
        UPDATE pgoutbox.message
        SET attempts = jsonb_build_array(
            (1, 1, 'retry', %(text)s, now(), now(), %(text)s, NULL, NULL, NULL)::pgoutbox.attempt
        )
        WHERE topic = %(text)s
    ), breaker AS (
        INSERT INTO pgoutbox.breaker (key, retry_at, cooldown_seconds, worker, last_error)
        VALUES (%(text)s, now(), 60, %(text)s, %(text)s)
    )
    INSERT INTO pgoutbox.audit (act_id, message_count, actor, db_role, origin, action, queue, message_ids, details)
    VALUES (
        gen_random_uuid(), 1, %(text)s, %(text)s, %(text)s, 'redrive', %(text)s, ARRAY[1::bigint],
        jsonb_build_object(%(text)s::text, %(text)s::text)
    )
"""

# Parts of a page that no template contains.
INJECTED: Final = """() => {
    const strange = [];
    for (const element of document.querySelectorAll("*")) {
        const tag = element.tagName.toLowerCase();
        if (["img", "iframe", "object", "embed", "base", "style", "b", "x"].includes(tag)) strange.push(tag);
        if (tag === "script" && !element.src.startsWith(location.origin + "/static/")) strange.push("script");
        if (tag === "link" && !element.href.startsWith(location.origin + "/static/")) strange.push("link");
        if (tag === "meta" && element.httpEquiv) strange.push("meta");
        for (const {name, value} of element.attributes) {
            if (name.startsWith("on") || name === "style" || name === "formaction") strange.push(`${tag} ${name}`);
            if (["href", "src", "action"].includes(name) && new URL(value, location.href).origin !== location.origin)
                strange.push(`${tag} ${name}=${value}`);
        }
    }
    return strange;
}"""


def attack(site: Site) -> None:
    """Write every attack into every text column of every table that the dashboard shows."""
    for text in HOSTILE_TEXTS:
        for state in State:
            site.db.execute(HOSTILE_MESSAGE, {"text": text, "state": state.value})
        site.db.execute(HOSTILE_ROWS, {"text": text})
    site.db.execute(CLAIM_ALL, {"lease": "1 hour"})


def kinds_of(url: str) -> set[tuple[str, ...]]:
    """Return what a page of this URL may show for the first time: its path without numbers, with each parameter, with
    each attack, and with each two parameters."""
    parts = urlsplit(url)
    path, asked = re.sub(r"[0-9]+", "n", parts.path), dict(parse_qsl(parts.query, keep_blank_values=True))
    attacks = {(path, name, attack) for name, text in asked.items() for attack in re.findall(rf"{MARK}\d", text)}
    return {
        (path,),
        *((path, name) for name in asked),
        *attacks,
        *((path, *two) for two in combinations(sorted(asked), 2)),
    }


def test_no_hostile_row_attacks_its_viewer_on_any_linked_page(site: Site) -> None:
    attack(site)
    page = site.visit()
    waiting, known = [page.url], kinds_of(page.url)
    loaded: dict[str, str] = {}
    while waiting:
        address = waiting.pop(0)
        answer = page.goto(address, wait_until="domcontentloaded")
        assert answer is not None
        assert answer.status < 500, address
        assert page.evaluate(INJECTED) == [], address
        loaded[urlsplit(address).path] = loaded.get(urlsplit(address).path, "") + page.inner_text("main")
        for link in page.evaluate("Array.from(document.querySelectorAll('a[href]'), (a) => a.href)"):
            assert urljoin(site.url, urlsplit(link).path).startswith(site.url)
            if not kinds_of(link) <= known:
                known |= kinds_of(link)
                waiting.append(link)
    assert len(loaded) > 5
    for path in ("/", "/messages", "/failed", "/queues", "/topics", "/workers", "/breakers", "/audit", "/bulk"):
        assert MARK in loaded[path], f"no attack stands on {path}"


def test_a_single_hostile_row_attacks_no_viewer(site: Site) -> None:
    attack(site)
    page = site.visit()
    # Each text and each state.
    query = "SELECT min(id) FROM pgoutbox.message GROUP BY topic, state ORDER BY topic, state"
    ids = [message_id for (message_id,) in site.db.execute(query)]
    for message_id in ids[:: len(State) - 1]:
        page.goto(f"/messages/{message_id}", wait_until="domcontentloaded")
        assert page.evaluate(INJECTED) == []
        assert page.inner_text("main").count(MARK) >= 10


def test_a_hostile_query_is_only_quoted(site: Site) -> None:
    page = site.visit()
    for text in HOSTILE_TEXTS:
        page.goto(f"/messages?{urlencode({'topic': text, 'text': text, 'done': text})}")
        assert page.evaluate(INJECTED) == []
        page.goto(f"/messages?{urlencode({'limit': text})}")
        assert page.evaluate(INJECTED) == []
        page.goto(f"/nowhere/{quote(text, safe='')}")
        assert page.evaluate(INJECTED) == []


def blocked(site: Site, page: Page) -> list[str]:
    """Return the scripts that the policy has blocked so far, as reported by the browser."""
    page.evaluate("1")
    return [text for text in site.watch.complaints if "Content Security Policy" in text]


def test_an_injected_script_does_not_run(site: Site) -> None:
    page = site.visit(token=VIEWER_TOKEN)
    page.evaluate(
        """() => {
            const script = document.createElement("script");
            script.textContent = "window.ran = true";
            document.body.append(script);
            document.querySelector("main").innerHTML += "<img src=x onerror='window.ran = true'>";
            const far = document.createElement("script");
            far.src = "https://evil.example/x.js";
            document.body.append(far);
        }"""
    )
    assert page.evaluate("window.ran") is None
    wait_until(lambda: len(blocked(site, page)) >= 3, lambda: f"three are blocked: {site.watch.complaints}")
    site.watch.complaints.clear()
