"""A Django project for each test."""

from __future__ import annotations

from contextlib import ExitStack
from datetime import UTC, datetime
from functools import cache
from typing import TYPE_CHECKING

import psycopg
import pytest

from tests.support.django_project import Project

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from datetime import date
    from pathlib import Path

    from tests.conftest import Server


@pytest.fixture
def new_project(empty_dsn: str, tmp_path: Path) -> Project:
    """Return a project whose database is empty."""
    return Project.create(tmp_path, empty_dsn)


@pytest.fixture(scope="session")
def project_template_of_today(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], str]]:
    """Return the name of a database that `migrate` of a project has migrated. Each day has its own partitions."""
    with ExitStack() as stack:

        @cache
        def template_of(_: date) -> str:
            database = stack.enter_context(server.database())
            project = Project.create(tmp_path_factory.mktemp("template"), server.dsn_for(database))
            project.call("migrate", "-v0")
            with psycopg.connect(project.dsn) as connection:
                connection.execute("UPDATE pgoutbox.home SET database_id = NULL")  # Its copies may send.
            return database

        yield lambda: template_of(datetime.now(UTC).date())


@pytest.fixture
def project(server: Server, project_template_of_today: Callable[[], str], tmp_path: Path) -> Iterator[Project]:
    """Return a project that is migrated."""
    with server.database(template=project_template_of_today()) as database:
        yield Project.create(tmp_path, server.dsn_for(database))
