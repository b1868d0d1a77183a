"""Take the screenshots of dashboard, Django's admin and site in docs/how-to/img, from an outbox with made-up messages.

    python -m tools.screenshots

Needs Chromium, as the browser tests do. The pictures are made by hand when a page has changed, not by the tests.
"""

from __future__ import annotations

import base64
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Literal
from wsgiref.simple_server import make_server

import psycopg
from playwright.sync_api import Browser, Page, sync_playwright
from psycopg.conninfo import conninfo_to_dict

from pgoutbox import migrate
from pgoutbox.dashboard import create_app
from pgoutbox.dashboard.access import Access
from pgoutbox.dashboard.server import Server
from pgoutbox.embedded import embedded_server
from pgoutbox.settings import Settings, load_settings
from tools import site

IMAGES: Final = Path(__file__).parents[1] / "docs" / "how-to" / "img"
QUALITY: Final = 82

ColorScheme = Literal["light", "dark"]
COLOR_SCHEMES: Final[tuple[ColorScheme, ...]] = ("light", "dark")
SIZES: Final = {"wide": (1440, 900), "phone": (390, 844)}

# The message of the detail page: it failed after several attempts.
TOLD_ID: Final = 10_001
PAGES: Final = {
    "overview": "/",
    "messages": "/messages",
    "message": f"/messages/{TOLD_ID}",
    "failed": "/failed",
    "queues": "/queues",
    "queue": "/queues?queue=mail",
    "workers": "/workers",
    "breakers": "/breakers",
    "audit": "/audit",
    "redrive-many": "/bulk?do=redrive&state=failed",
}
SIGN_IN: Final = "sign-in"

_FILL: Final = """
INSERT INTO pgoutbox.message (
    id, topic, queue, destination, payload, state, coalesce_key, key_in_flight, attempt_count, created_at, available_at,
    claimed_at, worker, finished_at, skip_reason, superseded_by, last_error
)
SELECT
    n,
    (ARRAY['mail.welcome', 'mail.receipt', 'webhook.order', 'sms.code'])[1 + n % 4],
    (ARRAY['default', 'mail', 'webhooks', 'default'])[1 + n % 4],
    (ARRAY['mailto:user' || n || '@example.org', 'mailto:shop' || n || '@example.org',
           'https://shop' || n % 9 || '.example.org/hook', 'sms:+15550' || 100000 + n])[1 + n % 4],
    jsonb_build_object('user_id', n),
    s.state,
    CASE WHEN n % 5 = 0 THEN 'user-' || n END,
    CASE WHEN n % 5 = 0 AND s.state = 'sending' THEN 'user-' || n END,
    CASE s.state WHEN 'pending' THEN 0 WHEN 'failed' THEN 11 ELSE 1 END,
    s.at,
    s.at,
    s.at,
    'worker-' || n % 3,
    CASE WHEN s.state NOT IN ('pending', 'sending') THEN s.at + (5 + n * 37 % 400) * interval '1 ms' END,
    CASE WHEN s.state = 'skipped' THEN 'superseded' END,
    CASE WHEN s.state = 'skipped' THEN n + 5 END,
    CASE WHEN s.state = 'failed' THEN (
        ARRAY['550 5.1.1 user' || n || '@example.org unknown', '550 5.7.1 not accepted',
              'HTTP 410 from shop' || n % 9 || '.example.org', 'the number +15550' || 100000 + n || ' is not in use']
    )[1 + n % 4] END
FROM (
    SELECT
        i AS n,
        now() - (10000 - i) * interval '3 s' - (sin(i / 40.0) + 1) * interval '20 s' AS at,
        CASE
            WHEN i > 9990 THEN 'sending'
            WHEN i > 9960 THEN 'pending'
            WHEN i % 23 = 0 THEN 'failed'
            WHEN i % 31 = 0 THEN 'skipped'
            WHEN i % 151 = 0 THEN 'cancelled'
            ELSE 'sent'
        END AS state
    FROM generate_series(1, 10000) AS i
) AS s
"""

_CLAIM: Final = """
INSERT INTO pgoutbox.claim (claimed_at, lease_expires_at, queue, worker, ids)
SELECT m.claimed_at, now() + interval '50 s', m.queue, m.worker, array_agg(m.id)
FROM pgoutbox.message_live AS m
WHERE m.state = 'sending'
GROUP BY m.claimed_at, m.queue, m.worker
"""

_TOLD: Final = """
INSERT INTO pgoutbox.message (
    id, topic, queue, destination, payload, headers, state, dedupe_key, attempt_count, created_at, available_at,
    claimed_at, worker, finished_at, last_error
) VALUES (
    %(id)s, 'webhook.order', 'webhooks', 'https://shop3.example.org/hook',
    '{"order": 4711, "total": "59.90", "customer": {"name": "Ada", "password": "hidden here"}}',
    '{"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}',
    'failed', 'order-4711', 4, now() - interval '12 min', now() - interval '12 min', now() - interval '4 min',
    'worker-1', now() - interval '3 min', 'HTTP 410 from shop3.example.org: gone'
)
"""

_ATTEMPTS: Final = """
UPDATE pgoutbox.message
SET attempts = (
    SELECT jsonb_agg((
        n,
        1,
        CASE WHEN n = 4 THEN 'failed' ELSE 'retry' END,
        'worker-' || n %% 3,
        now() - (13 - 2 * n) * interval '1 min',
        now() - (13 - 2 * n) * interval '1 min' + n * interval '210 ms',
        CASE WHEN n = 4 THEN 'HTTP 410 from shop3.example.org: gone' ELSE 'HTTP 503 from shop3.example.org' END,
        NULL,
        NULL,
        NULL
    )::pgoutbox.attempt ORDER BY n)
    FROM generate_series(1, 4) AS n
)
WHERE id = %(id)s
"""

_QUEUES: Final = """
INSERT INTO pgoutbox.queue (
    name, paused_at, resume_at, rate_count, rate_seconds, burst, tokens, tokens_at, max_in_flight
) VALUES
    ('mail', NULL, NULL, 20, 1, 5, 5, now(), NULL),
    ('webhooks', now() - interval '3 min', now() + interval '27 min', NULL, NULL, NULL, NULL, NULL, 10)
"""

_BREAKER: Final = """
INSERT INTO pgoutbox.breaker (key, opened_at, retry_at, cooldown_seconds, worker, last_error)
VALUES ('host:shop3.example.org', now() - interval '6 min', now() + interval '40 s', 60, 'worker-1',
        'HTTP 503 from shop3.example.org')
"""

_AUDIT: Final = """
INSERT INTO pgoutbox.audit (
    acted_at, act_id, message_count, actor, db_role, origin, action, queue, message_ids, details
)
SELECT
    now() - a.minutes * interval '1 min', md5(a.minutes::text)::uuid, a.message_count, a.actor, 'outbox_operator',
    a.origin, a.action, a.queue, a.message_ids, a.details
FROM (VALUES
    (40, 2, 'grace', 'cli ops1', 'cancel', NULL, '{17,18}'::bigint[], NULL::jsonb),
    (25, 312, 'ada', 'web 192.0.2.7', 'redrive', NULL, NULL, '{"state": "failed", "topic": "mail.receipt"}'),
    (3, NULL, 'ada', 'web 192.0.2.7', 'pause', 'webhooks', NULL, '{"until": "in half an hour"}'),
    (1, 1, 'ada', 'web 192.0.2.7', 'redrive', NULL, ARRAY[%(id)s::bigint], NULL)
) AS a (minutes, message_count, actor, origin, action, queue, message_ids, details)
"""


def fill(connection: psycopg.Connection) -> None:
    """Put the made-up messages into an empty outbox: one hour of a busy shop."""
    told = {"id": TOLD_ID}
    with connection.transaction():
        connection.execute(_FILL)
        connection.execute(_CLAIM)
        connection.execute(_TOLD, told)
        connection.execute(_ATTEMPTS, told)
        connection.execute(_QUEUES)
        connection.execute(_BREAKER)
        connection.execute(_AUDIT, told)
        connection.execute("SELECT setval('pgoutbox.message_id_seq', 10000)")


def chromium() -> str | None:
    """Return the path of Debian's Chromium, or None if it is not installed."""
    return shutil.which("chromium")


@contextmanager
def open_browser(executable: str) -> Iterator[Browser]:
    """Start a headless Chromium, without its sandbox, which does not work for root."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def _serving(settings: Settings) -> Iterator[str]:
    started, told = threading.Event(), list[str]()

    def tell(url: str) -> None:
        told.append(url)
        started.set()

    app = create_app(settings, access=Access.from_settings(settings))
    server = Server(app, settings, host="127.0.0.1", port=0, started=tell)
    thread = threading.Thread(target=server.serve_until_stopped)
    thread.start()
    try:
        started.wait()
        yield told[0].rstrip("/")
    finally:
        server.should_exit = True
        thread.join()


@contextmanager
def _serving_admin(dsn: str, password: str) -> Iterator[str]:
    """Serve Django's admin for a superuser named ada, with an outbox that is migrated."""
    import django
    from django.conf import settings
    from django.contrib.staticfiles.handlers import StaticFilesHandler
    from django.core.management import call_command
    from django.core.wsgi import get_wsgi_application
    from django.urls import path

    given = conninfo_to_dict(dsn)
    processors = ["template.context_processors.request", "contrib.auth.context_processors.auth"]
    processors += ["contrib.messages.context_processors.messages"]
    middleware = ["sessions.middleware.Session", "auth.middleware.Authentication", "messages.middleware.Message"]
    applications = ["admin", "auth", "contenttypes", "sessions", "messages", "staticfiles"]
    settings.configure(
        DEBUG=True,  # For the static files.
        SECRET_KEY=password * 3,
        USE_TZ=True,
        STATIC_URL="/static/",
        DATABASES={
            "default": {
                "ENGINE": "django.db.backends.postgresql",
                "NAME": given["dbname"],
                "USER": given["user"],
                "HOST": given["host"],
                "PORT": given["port"],
            }
        },
        INSTALLED_APPS=[*(f"django.contrib.{name}" for name in applications), "pgoutbox.contrib.django"],
        MIDDLEWARE=[f"django.contrib.{name}Middleware" for name in middleware],
        TEMPLATES=[
            {
                "BACKEND": "django.template.backends.django.DjangoTemplates",
                "APP_DIRS": True,
                "OPTIONS": {"context_processors": [f"django.{name}" for name in processors]},
            }
        ],
    )
    django.setup()
    from django.contrib import admin
    from django.contrib.auth.models import User

    settings.ROOT_URLCONF = (path("", admin.site.urls),)
    call_command("migrate", verbosity=0)
    User.objects.create_superuser("ada", password=password)
    server = make_server("127.0.0.1", 0, StaticFilesHandler(get_wsgi_application()))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()


def main() -> None:
    """Take all screenshots."""
    executable = chromium()
    if executable is None:
        sys.exit("chromium is not installed: apt-get install chromium")
    token = "a-token-that-is-long-enough"
    IMAGES.mkdir(exist_ok=True)
    with embedded_server(durable=False) as database:
        migrate.upgrade(database.dsn)
        with psycopg.connect(database.dsn) as connection:
            fill(connection)
        # Django refuses a database in the event loop of a browser, so it is set up first.
        with _serving_admin(database.dsn, token) as admin_url, open_browser(executable) as browser:
            with _serving(load_settings(dsn=database.dsn, web={"operator_tokens": f"ada:{token}"})) as url:
                page = browser.new_page(base_url=url, java_script_enabled=False, reduced_motion="reduce")
                page.goto("/login")
                _shoot(page, f"dashboard-{SIGN_IN}")
                page.get_by_label("Token").fill(token)
                page.get_by_role("button", name="Sign in").click()
                while page.get_by_text("Still counting").count():
                    page.reload()
                for name, path in PAGES.items():
                    page.goto(path)
                    _shoot(page, f"dashboard-{name}")
            page = browser.new_page(base_url=admin_url, java_script_enabled=False)
            page.goto("/login/?next=/pgoutbox/message/%3Fstate__exact%3Dfailed")
            page.get_by_label("Username").fill("ada")
            page.get_by_label("Password").fill(token)
            page.get_by_role("button", name="Log in").click()
            _shoot(page, "django-admin", ["light"])
            with tempfile.TemporaryDirectory() as folder:
                site.build(site.ROOT, Path(folder))
                page = browser.new_page(reduced_motion="reduce")
                page.goto(f"file://{folder}/html/how-to/django.html")
                _shoot(page, "site", ["light"])


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
