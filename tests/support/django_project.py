"""A Django project in a directory of its own, for tests that run its `manage.py`."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import django
import psycopg
from psycopg.conninfo import conninfo_to_dict

from tests.support.forks import LIBRARIES, Fork, Forks, forks, without_settings
from tests.support.waiting import PROCESS_PATIENCE_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable

MANAGE: Final = """
import os
from django.core.management import execute_from_command_line

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "club.settings")
execute_from_command_line()
"""
SETTINGS: Final = """
SECRET_KEY = "k" * 60
INSTALLED_APPS = ["django.contrib.auth", "django.contrib.contenttypes", "pgoutbox.contrib.django", "members"]
DATABASES = {"default": {"ENGINE": "django.db.backends.postgresql", **DATABASE}}
ROOT_URLCONF = "club.urls"
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
TEMPLATES = [{"BACKEND": "django.template.backends.django.DjangoTemplates", "APP_DIRS": True}]
DEFAULT_FROM_EMAIL = "The club <club@example.org>"
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
"""
# What a command of a project imports too, without the modules that need its settings.
DJANGO: Final = (
    "django.core.mail",
    "django.core.management.commands.shell",
    "django.db.backends.postgresql.base",
    "django.template.defaulttags",
    "django.test",
    "django.views.generic",
)
BACKEND: Final = "pgoutbox.contrib.django.mail.EmailBackend"
HANDLERS: Final = """
from pgoutbox import Email, Message, SyncContext, Topic
from pgoutbox.contrib.django import outbox

outbox.define(Topic("mail.welcome"))


@outbox.handler("mail.welcome")
def welcome(message: Message, ctx: SyncContext) -> Email:
    return Email(subject="Welcome", text="Hello")
"""
URLS: Final = """
from django.contrib.auth import views
from django.urls import path

urlpatterns = [
    path("reset/", views.PasswordResetView.as_view(), name="password_reset"),
    path("reset/done/", views.PasswordResetDoneView.as_view(), name="password_reset_done"),
    path("reset/<uidb64>/<token>/", views.PasswordResetConfirmView.as_view(), name="password_reset_confirm"),
]
"""

ADMIN_URLS: Final = """
from django.contrib import admin
from django.urls import path

urlpatterns = [path("admin/", admin.site.urls)]
"""
ADMIN_SETTINGS: Final = """
INSTALLED_APPS += [f"django.contrib.{name}" for name in ("admin", "messages", "sessions", "staticfiles")]
MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]
TEMPLATES[0]["OPTIONS"] = {
    "context_processors": [
        "django.template.context_processors.request",
        "django.contrib.auth.context_processors.auth",
        "django.contrib.messages.context_processors.messages",
    ]
}
STATIC_URL = "/static/"
"""

# The start of a program that sends e-mails: one whose transaction rolls back.
ROLLED_BACK: Final = """
from django.core.mail import EmailMultiAlternatives, send_mail
from django.db import transaction

try:
    with transaction.atomic():
        send_mail("Rolled back", "is not sent", None, ["ann@example.org"])
        raise KeyError
except KeyError:
    pass
"""


@dataclass(frozen=True)
class Project:
    """A project in a directory, with its database."""

    directory: Path
    dsn: str
    settings: str = "club/settings.py"
    on_warning: str = "error"

    @classmethod
    def create(cls, directory: Path, dsn: str, settings: str = "") -> Project:
        """Write the files of a project with these further settings. Its database is not migrated."""
        project = cls(directory, dsn)
        (directory / "manage.py").write_text(MANAGE)
        for package in ("club", "members"):
            (directory / package).mkdir()
            (directory / package / "__init__.py").touch()
        (directory / "club" / "settings.py").write_text(f"DATABASE = {project.database!r}\n{SETTINGS}{settings}")
        (directory / "club" / "urls.py").write_text(URLS)
        (directory / "members" / "outbox.py").write_text(HANDLERS)
        return project

    @property
    def database(self) -> dict[str, str]:
        """The database as Django names it."""
        given = conninfo_to_dict(self.dsn)
        return {
            "NAME": str(given["dbname"]),
            "USER": str(given["user"]),
            "HOST": str(given["host"]),
            "PORT": str(given["port"]),
        }

    def set(self, **settings: object) -> None:
        """Append these settings."""
        with (self.directory / self.settings).open("a") as file:
            file.writelines(f"{name} = {value!r}\n" for name, value in settings.items())

    def add_admin(self, **settings: object) -> None:
        """Serve Django's admin at `/admin/`, with these further settings."""
        (self.directory / "club" / "urls.py").write_text(ADMIN_URLS)
        with (self.directory / self.settings).open("a") as file:
            file.write(ADMIN_SETTINGS)
        self.set(**settings)

    def send_by(self, port: int = 25, *, deliver_with: str | None = None, **settings: object) -> None:
        """Send e-mail through the outbox, to this port or with this backend."""
        if django.VERSION >= (6, 1):
            options = {} if deliver_with is None else {"deliver_with": "last"}
            mailers = {"default": {"BACKEND": BACKEND, "OPTIONS": options}, "last": {"BACKEND": deliver_with}}
            settings = {"SMTP_HOST": "127.0.0.1", "SMTP_PORT": port, "SMTP_SECURITY": "none"} | settings
            self.set(MAILERS=mailers, PGOUTBOX=settings)
        else:
            settings |= {} if deliver_with is None else {"DELIVER_WITH": deliver_with}
            self.set(EMAIL_BACKEND=BACKEND, EMAIL_HOST="127.0.0.1", EMAIL_PORT=port, PGOUTBOX=settings)

    @property
    def _forks(self) -> Forks:
        return forks(*LIBRARIES, *DJANGO, warning=self.on_warning)

    def start(self, *arguments: str) -> Fork:
        """Start `manage.py` with these arguments, without input and output."""
        command = ["manage.py", *arguments]
        with Path(os.devnull).open("r+") as nothing:
            streams = (nothing.fileno(), nothing.fileno(), nothing.fileno())
            return self._forks.start(command, cwd=self.directory, env=without_settings(os.environ), streams=streams)

    def call(self, *arguments: str, code: int = 0) -> str:
        """Run `manage.py` with these arguments, and return what it prints."""
        command = ["manage.py", *arguments]
        done = self._forks.run(command, cwd=self.directory, env=without_settings(os.environ))
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    async def manage(self, *arguments: str, code: int = 0) -> str:
        """Run `manage.py` beside the event loop, whose servers it may need."""
        return await asyncio.to_thread(self.call, *arguments, code=code)

    async def type(self, script: str) -> str:
        """Type commands of the page. `python` forks from the process with the imports."""
        programs = self.directory / ".bin"
        programs.mkdir(exist_ok=True)
        (programs / "python").write_text(f"#!/bin/sh\n{self._forks.script()}")
        (programs / "python").chmod(0o700)
        path = os.pathsep.join([str(programs), str(Path(sys.executable).parent), os.environ["PATH"]])
        done = await asyncio.to_thread(
            subprocess.run,
            ["bash", "-ec", script],
            cwd=self.directory,
            env=without_settings(os.environ) | {"PATH": path},
            capture_output=True,
            text=True,
            timeout=PROCESS_PATIENCE_SECONDS,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    async def run(self, program: str, **options: int) -> str:
        """Run a program in the project."""
        return await self.manage("shell", "-v0", "-c", program, **options)


def states(project: Project) -> list[tuple[str, str]]:
    with psycopg.connect(project.dsn) as connection:
        return connection.execute("SELECT topic, state FROM pgoutbox.message ORDER BY id").fetchall()


def are_sent(project: Project, count: int) -> Callable[[], bool]:
    return lambda: [state for _, state in states(project)] == ["sent"] * count
