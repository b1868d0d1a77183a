"""Take the screenshots of dashboard, Django's admin and site in docs/how-to/img, from an outbox with made-up messages.

    python -m tools.screenshots

Needs Chromium, as the browser tests do. The pictures are made by hand when a page has changed, not by the tests.
"""

from __future__ import annotations

import base64
import signal
import socket
import sys
import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

import psycopg

from pgoutbox.dashboard import create_app
from pgoutbox.dashboard.access import Access
from pgoutbox.embedded import embedded_server
from tests.support.browsers import COLOR_SCHEMES, SIZES, open_browser
from tests.support.django_project import Project
from tests.support.ports import free_port
from tests.support.shop import PAGES, fill
from tests.support.waiting import wait_until
from tests.support.web_server import OPERATOR_TOKEN, serving, web_settings
from tools import site

if TYPE_CHECKING:
    from collections.abc import Sequence

    from playwright.sync_api import Page

    from tests.support.browsers import ColorScheme

IMAGES: Final = site.ROOT / "docs" / "how-to" / "img"
QUALITY: Final = 82
_SUPERUSER: Final = """
from django.contrib.auth.models import User

User.objects.create_superuser("ada", password="a-password")
"""


def main() -> None:
    """Take all screenshots."""
    IMAGES.mkdir(exist_ok=True)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        dsn = stack.enter_context(embedded_server(durable=False)).dsn
        (folder / "project").mkdir()
        project = Project.create(folder / "project", dsn)
        project.add_admin(DEBUG=True)  # It serves the static files.
        project.call("migrate", "-v0")
        project.call("shell", "-v0", "-c", _SUPERUSER)
        with psycopg.connect(dsn) as connection:
            fill(connection)
        browser = stack.enter_context(open_browser())

        settings = web_settings(dsn=dsn)
        url = stack.enter_context(serving(create_app(settings, access=Access.from_settings(settings)), settings))
        page = browser.new_page(base_url=url, java_script_enabled=False, reduced_motion="reduce")
        page.goto("/login")
        _shoot(page, "dashboard-sign-in")
        page.get_by_label("Token").fill(OPERATOR_TOKEN)
        page.get_by_role("button", name="Sign in").click()
        while page.get_by_text("Still counting").count():
            page.reload()
        for name, path in PAGES.items():
            page.goto(path)
            _shoot(page, f"dashboard-{name}")

        port = free_port()
        server = project.start("runserver", "--noreload", str(port))
        stack.callback(server.wait)
        stack.callback(server.send_signal, signal.SIGTERM)
        wait_until(lambda: _is_served(port), lambda: "Django's admin is not served")
        page = browser.new_page(base_url=f"http://127.0.0.1:{port}", java_script_enabled=False)
        page.goto("/admin/login/?next=/admin/pgoutbox/message/%3Fstate__exact%3Dfailed")
        page.get_by_label("Username").fill("ada")
        page.get_by_label("Password").fill("a-password")
        page.get_by_role("button", name="Log in").click()
        _shoot(page, "django-admin", ["light"])

        site.build(site.ROOT, folder)
        page = browser.new_page(reduced_motion="reduce")
        page.goto(f"file://{folder}/html/how-to/django.html")
        _shoot(page, "site", ["light"])


def _is_served(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


def _shoot(page: Page, name: str, schemes: Sequence[ColorScheme] = COLOR_SCHEMES) -> None:
    for scheme in schemes:
        for size, (width, height) in SIZES.items():
            page.emulate_media(color_scheme=scheme)
            page.set_viewport_size({"width": width, "height": height})
            devtools = page.context.new_cdp_session(page)
            taken = devtools.send("Page.captureScreenshot", {"format": "webp", "quality": QUALITY})
            file = IMAGES / f"{name}-{scheme}-{size}.webp"
            file.write_bytes(base64.b64decode(taken["data"]))
            sys.stdout.write(f"{file.name} {file.stat().st_size:,} bytes\n")


if __name__ == "__main__":
    main()
