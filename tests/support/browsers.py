"""Debian's Chromium, and the screens that pages are made for."""

from __future__ import annotations

import shutil
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, Literal

from playwright.sync_api import sync_playwright

from tests.support.missing import server_missing

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Browser

ColorScheme = Literal["light", "dark"]
COLOR_SCHEMES: Final[tuple[ColorScheme, ...]] = ("light", "dark")
SIZES: Final = {"wide": (1440, 900), "phone": (390, 844)}


@contextmanager
def open_browser() -> Iterator[Browser]:
    """Start a headless Chromium, without its sandbox, which does not work for root. Skip the test without it.

    The build without windows needs less than half of the CPU time of the other.
    """
    executable = shutil.which("chromium-headless-shell") or shutil.which("chromium")
    if executable is None:
        server_missing("chromium-headless-shell is not installed")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()
