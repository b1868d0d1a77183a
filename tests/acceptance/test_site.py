"""Tests the documentation site: a strict build, and its pages in Chromium, on a desk and on a phone, light and dark.

It is one test, so that the site is built once.
"""

from __future__ import annotations

import re
import threading
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Final

import pytest
from playwright.sync_api import expect

import pgoutbox
from tests.support.browsers import COLOR_SCHEMES, open_browser
from tests.support.pages import ROOT
from tools import site

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from playwright.sync_api import Browser, Page, Route

    from tests.support.browsers import ColorScheme

SEEN: Final = ("index.html", "reference/settings.html")
LOADED: Final = re.compile(
    r"<(?:script|img|iframe|link(?=[^>]*rel=\"(?:stylesheet|icon|preload|preconnect)))[^>]*//[^>]*>"
)


@pytest.mark.slow
def test_the_site_is_complete_and_works_on_a_desk_and_on_a_phone_without_other_hosts(tmp_path: Path) -> None:
    site.build(ROOT, tmp_path)
    built = tmp_path / "site"
    built.mkdir()
    (built / "versions.json").write_text('[{"version": "0.0.9", "title": "0.0.9", "aliases": ["latest"]}]')
    site.publish(tmp_path / "html", built)
    _expect_every_page_as_html_and_as_markdown(built / pgoutbox.__version__)
    with open_browser() as browser:
        for width in (1440, 390):
            for scheme in COLOR_SCHEMES:
                with _opened(built, browser, width, scheme) as (page, address):
                    _expect_pages_that_fit(page, address, "default" if scheme == "light" else "slate")
        with _opened(built, browser, 1440, "light") as (page, address):
            page.goto(address.removesuffix("latest/"))
            _expect_the_versions_copy_buttons_and_search(page)


def _expect_every_page_as_html_and_as_markdown(built: Path) -> None:
    assert "<code>--role viewer|operator</code>" in (built / "reference/cli.html").read_text()
    index = (built / "llms.txt").read_text()
    for page, file in site.pages_of(ROOT).items():
        title = (ROOT / file).read_text().partition("\n")[0]
        assert (built / page).read_text().startswith(f"{title}\n")
        assert f"[{title.removeprefix('# ')}]({page}): " in index
        assert LOADED.findall((built / page).with_suffix(".html").read_text()) == [], page


def _expect_pages_that_fit(page: Page, address: str, scheme: str) -> None:
    for name in SEEN:
        page.goto(address + name)
        expect(page.locator("h1")).to_be_visible()
        expect(page.locator("body")).to_have_attribute("data-md-color-scheme", scheme)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), (name, page.viewport_size)


def _expect_the_versions_copy_buttons_and_search(page: Page) -> None:
    expect(page.get_by_role("banner")).to_contain_text(f"pgoutbox {pgoutbox.__version__}")
    expect(page.locator(".md-version a")).to_have_text([pgoutbox.__version__, "0.0.9"])
    expect(page.get_by_title("Copy to clipboard").first).to_be_attached()
    expect(page.get_by_title("Copy as Markdown")).to_be_visible()
    page.get_by_role("button", name="Search").click()
    page.get_by_role("combobox", name="Search").fill("coalesce key")
    page.locator("a", has_text="A coalesce key delivers only the newest committed message").first.click()
    expect(page.locator("h1")).to_contain_text("Coalesce and dedupe messages")


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass


@contextmanager
def _opened(built: Path, browser: Browser, width: int, scheme: ColorScheme) -> Iterator[tuple[Page, str]]:
    """Serve the site, and give a page of a browser. Fail on errors, warnings, and requests to other hosts."""
    complaints: list[str] = []

    def refuse(route: Route) -> None:
        complaints.append(f"request: {route.request.url}")
        route.abort()

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=built)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/"
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        context.on("console", lambda message: complaints.append(f"{message.type}: {message.text}"))
        context.on("weberror", lambda error: complaints.append(f"error: {error.error}"))
        context.route(lambda url: not url.startswith(address), refuse)
        try:
            yield context.new_page(), f"{address}latest/"
        finally:
            context.close()
            server.shutdown()
    assert complaints == []
