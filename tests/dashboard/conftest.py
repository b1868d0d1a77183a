"""The fixtures of tests with many databases."""

from tests.promises.conftest import databases, start_fleet, start_worker

__all__ = ["databases", "start_fleet", "start_worker"]
