"""A Django project for each test."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.django_project import HANDLERS, MANAGE, SETTINGS, URLS, Project

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def new_project(empty_dsn: str, tmp_path: Path) -> Project:
    """Return a project whose database is empty."""
    project = Project(tmp_path, empty_dsn)
    (tmp_path / "manage.py").write_text(MANAGE)
    for package in ("club", "members"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
    (tmp_path / "club" / "settings.py").write_text(f"DATABASE = {project.database!r}\n{SETTINGS}")
    (tmp_path / "club" / "urls.py").write_text(URLS)
    (tmp_path / "members" / "outbox.py").write_text(HANDLERS)
    return project


@pytest.fixture
async def project(new_project: Project) -> Project:
    """Return a project that is migrated."""
    await new_project.manage("migrate", "-v0")
    return new_project
