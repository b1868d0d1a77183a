"""A test without its server is skipped. In CI it fails."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

import psycopg
import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator


def server_missing(reason: str) -> NoReturn:
    """Skip the test, or fail it in CI, where every server must exist."""
    if os.environ.get("CI") == "true":
        pytest.fail(f"CI must not skip this: {reason}", pytrace=False)
    pytest.skip(reason)


@contextmanager
def setting_of_old_servers() -> Iterator[None]:
    """Skip the test if the server refuses a setting: PostgreSQL 19 removed `standard_conforming_strings = off`.

    CI runs older servers, so there the test fails.
    """
    try:
        yield
    except psycopg.errors.FeatureNotSupported as error:
        server_missing(f"the server does not support the setting: {error}")
