"""A Django project for each test."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.django_project import Project

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def new_project(empty_dsn: str, tmp_path: Path) -> Project:
    """Return a project whose database is empty."""
    return Project.create(tmp_path, empty_dsn)


@pytest.fixture
async def project(new_project: Project) -> Project:
    """Return a project that is migrated."""
    await new_project.manage("migrate", "-v0")
    return new_project
