"""Tests with `pgoutbox.contrib.django.test`: a project whose own tests run by `manage.py test`."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Final

import django
import psycopg
import pytest
from cryptography.fernet import Fernet
from psycopg import sql

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.django_project import Project

pytestmark = pytest.mark.slow

TESTS: Final = Path(__file__).parent / "club_tests"
TEST_COUNT: Final = len(re.findall(r"^    (?:async )?def test_", (TESTS / "tests.py").read_text(), re.MULTILINE))
URLS: Final = """
from django.urls import path

from members import views

urlpatterns = [path("join/", views.join), path("join-async/", views.join_async)]
"""


@pytest.fixture
def club(new_project: Project) -> Iterator[Project]:
    """Return a project with tests. The databases that they keep are dropped."""
    shutil.copytree(TESTS, new_project.directory / "members", dirs_exist_ok=True)
    (new_project.directory / "club" / "urls.py").write_text(URLS)
    new_project.set(
        DATABASES={"default": {**database_of(new_project), "ATOMIC_REQUESTS": True}},
        PGOUTBOX={"ENCRYPTION_KEYS": Fernet.generate_key().decode()},
        TASKS={"default": {"BACKEND": "pgoutbox.contrib.django.tasks.OutboxBackend"}},
    )
    if django.VERSION < (6, 0):
        with (new_project.directory / "club" / "settings.py").open("a") as file:
            file.write('INSTALLED_APPS += ["django_tasks"]\n')
    yield new_project
    with psycopg.connect(new_project.dsn, autocommit=True) as connection:
        pattern = f"test%{new_project.database['NAME']}%"
        for (name,) in connection.execute(
            "SELECT datname FROM pg_database WHERE datname LIKE %s", (pattern,)
        ).fetchall():
            connection.execute(sql.SQL("DROP DATABASE {}").format(sql.Identifier(name)))


def database_of(project: Project) -> dict[str, str]:
    return {"ENGINE": "django.db.backends.postgresql", **project.database}


async def test_the_tests_of_a_project_deliver_in_their_transactions(club: Project) -> None:
    for options in (["--keepdb"], ["--keepdb", "--parallel", "2"]):
        shown = await club.manage("test", *options)
        assert f"Ran {TEST_COUNT} tests" in shown
        assert "\nOK" in shown


async def test_the_outbox_may_be_in_another_database(club: Project) -> None:
    business = {**database_of(club), "TEST": {"NAME": f"test_business_{club.database['NAME']}"}}
    club.set(DATABASES={"default": business, "mail": database_of(club)}, PGOUTBOX={"DATABASE": "mail"})
    shown = await club.manage("test", "members.two_databases")
    assert "Ran 3 tests" in shown
