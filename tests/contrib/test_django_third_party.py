"""Runs projects of others, unmodified: only the settings name pgoutbox."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

import psycopg
import pytest

from tests.support.django_project import Project, states
from tests.support.smtp_server import accepting_server, parsed

pytestmark = pytest.mark.slow

ALLAUTH: Final = """
INSTALLED_APPS += ["django.contrib.sessions", "django.contrib.messages", "allauth", "allauth.account"]
MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "allauth.account.middleware.AccountMiddleware",
]
AUTHENTICATION_BACKENDS = ["allauth.account.auth_backends.AuthenticationBackend"]
TEMPLATES[0]["OPTIONS"] = {
    "context_processors": [
        "django.template.context_processors.request",
        "django.contrib.auth.context_processors.auth",
        "django.contrib.messages.context_processors.messages",
    ]
}
ALLOWED_HOSTS = ["testserver"]
ACCOUNT_EMAIL_VERIFICATION = "mandatory"
ACCOUNT_SIGNUP_FIELDS = ["username*", "email*", "password1*", "password2*"]
CACHES = {"default": {"BACKEND": "django.core.cache.backends.dummy.DummyCache"}}
DATABASES["default"]["ATOMIC_REQUESTS"] = True
ROOT_URLCONF = "allauth.urls"
"""
SIGN_UP: Final = """
from django.contrib.auth.models import User
from django.db import transaction
from django.test import Client


def sign_up(name):
    passwords = {"password1": "a-long-password", "password2": "a-long-password"}
    form = {"email": f"{name}@example.org", "username": name} | passwords
    assert Client().post("/signup/", form).status_code == 302


with transaction.atomic():
    sign_up("eve")
    transaction.set_rollback(True)
assert not User.objects.exists()
sign_up("ann")
assert Client().post("/password/reset/", {"email": "ann@example.org"}).status_code == 302
"""


async def test_allauth_sends_its_emails_with_the_transaction_of_the_request(new_project: Project) -> None:
    project = new_project
    async with accepting_server() as inbox:
        project.send_by(inbox.port)
        with (project.directory / "club" / "settings.py").open("a") as file:
            file.write(ALLAUTH)
        await project.manage("migrate", "-v0")
        await project.run(SIGN_UP)
        assert states(project) == [("django.mail", "pending")] * 2
        await project.manage("pgoutbox", "worker", "--once")
    texts = [parsed(one.content).get_content() for one in inbox.received]
    assert [one.recipients for one in inbox.received] == [["ann@example.org"]] * 2
    assert sorted("/confirm-email/" in text for text in texts) == [False, True]
    assert sorted("/password/reset/key/" in text for text in texts) == [False, True]


# --- Wagtail ----------------------------------------------------------------------------------------------------------

# Its template reads these settings last.
WAGTAIL: Final = """
from .base import INSTALLED_APPS

INSTALLED_APPS += ["django.contrib.postgres", "pgoutbox.contrib.django"]
DATABASES = {{"default": {{"ENGINE": "django.db.backends.postgresql", **{database}}}}}
TASKS = {{"default": {{"BACKEND": "pgoutbox.contrib.django.tasks.OutboxBackend"}}}}
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
"""
# An editor submits a page to a moderator, who approves it. Wagtail sends e-mails and enqueues tasks on the way.
MODERATION: Final = """
from django.contrib.auth.models import Group, User
from django.core.files.base import ContentFile
from django.db import connection, transaction
from django.test import Client
from django.urls import reverse
from home.models import HomePage
from wagtail.documents.models import Document
from wagtail.models import TaskState


def client_of(name, **fields):
    user = User.objects.create_user(name, f"{name}@example.org", "a-long-password", **fields)
    if not user.is_superuser:
        user.groups.add(Group.objects.get(name=name.title()))
    client = Client()
    assert client.login(username=name, password="a-long-password")
    return client


def topics():
    with connection.cursor() as cursor:
        cursor.execute("SELECT topic FROM pgoutbox.message ORDER BY id")
        return [topic for (topic,) in cursor.fetchall()]


def submit():
    management = {f"comments-{name}_FORMS": 0 for name in ("TOTAL", "INITIAL")}
    form = {"title": "New title", "slug": "home", "action-submit": "1", **management}
    assert editor.post(f"/admin/pages/{home.pk}/edit/", form).status_code == 302


client_of("admin", is_superuser=True)
editor, moderator = client_of("editors"), client_of("moderators")
home = HomePage.objects.get()
before = topics()
with transaction.atomic():
    submit()
    assert {"django.mail", "django.task"} <= set(topics()[len(before):])
    transaction.set_rollback(True)
assert topics() == before
submit()
approve = reverse("wagtailadmin_pages:workflow_action", args=(home.pk, "approve", TaskState.objects.get().pk))
assert moderator.post(approve, {"comment": "fine"}).status_code in (200, 302)
assert HomePage.objects.get().title == "New title"
document = Document.objects.create(title="Old", file=ContentFile(b"text", "old.txt"))
document.delete()
"""


def new_site(directory: Path, dsn: str) -> Project:
    """Return the project of Wagtail's template, with settings of its own."""
    program = Path(sys.executable).with_name("wagtail")
    subprocess.run([program, "start", "club", directory], check=True, capture_output=True)
    settings = directory / "club" / "settings" / "dev.py"
    settings.write_text(settings.read_text().replace("EMAIL_BACKEND = ", "_ = "))  # Django 6.1 allows only MAILERS.
    project = Project(directory, dsn, "club/settings/local.py", on_warning="ignore")  # Not of this project.
    (directory / project.settings).write_text(WAGTAIL.format(database=project.database))
    return project


def files_of(project: Project) -> list[str]:
    """Return the names of the site's documents."""
    return [path.name for path in project.directory.glob("media/documents/*")]


async def test_the_moderation_of_wagtail_mails_and_runs_its_tasks_with_its_transactions(
    empty_dsn: str, tmp_path: Path
) -> None:
    project = new_site(tmp_path, empty_dsn)
    async with accepting_server() as inbox:
        project.send_by(inbox.port)
        await project.manage("migrate", "-v0")
        await project.run(MODERATION)
        assert files_of(project) == ["old.txt"]
        await project.manage("pgoutbox", "worker", "--once")
    assert files_of(project) == []
    subjects = [
        str(parsed(one.content)["subject"]).strip().removeprefix('The page "New title" has been ')
        for one in inbox.received
    ]
    for_approval = 'submitted for approval in moderation stage "Moderators approval"'
    assert sorted(subjects) == [
        'approved in "Moderators approval".',
        for_approval,
        for_approval,
        'submitted to workflow "Moderators approval"',
    ]
    with psycopg.connect(project.dsn) as connection:
        errors = connection.execute(
            "SELECT DISTINCT error FROM pgoutbox.attempt_view WHERE outcome <> 'sent'"
        ).fetchall()
    assert ["DoesNotExist" in error for (error,) in errors] == [True]  # An index of the deleted document.
