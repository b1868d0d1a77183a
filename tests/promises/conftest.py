"""Worker processes with the handlers of a test, and its database: promises are tested at the surface."""

from __future__ import annotations

import textwrap
from contextlib import ExitStack
from itertools import count
from typing import TYPE_CHECKING, Protocol

import pytest

from tests.support.many_databases import Databases, StartFleet
from tests.support.worker_process import WorkerProcess

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from tests.conftest import Server


class StartWorker(Protocol):
    """Starts `pgoutbox worker` with the handlers of `application`, and kills it when the test ends.

    `application` is the text of a module with an `outbox`. Settings are named without their prefix; None unsets one.
    """

    def __call__(
        self, application: str, *arguments: str, environment: Mapping[str, str] | None = None, **settings: str | None
    ) -> WorkerProcess: ...


@pytest.fixture
def start_worker(dsn: str, tmp_path: Path) -> Iterator[StartWorker]:
    """Start workers on the test's database; a test may give them another `dsn`."""
    with ExitStack() as stack:
        numbers = count(1)

        def start(
            application: str, *arguments: str, environment: Mapping[str, str] | None = None, **settings: str | None
        ) -> WorkerProcess:
            number = next(numbers)
            module = tmp_path / f"promise_app_{number}.py"
            module.write_text(textwrap.dedent(application))
            worker = WorkerProcess(
                f"{module.stem}:outbox",
                *arguments,
                log=tmp_path / f"worker-{number}.log",
                settings={name: value for name, value in {"dsn": dsn, **settings}.items() if value is not None},
                environment={"PYTHONPATH": str(tmp_path), **(environment or {})},
            )
            stack.callback(worker.end)
            return worker

        yield start


@pytest.fixture
def databases(server: Server, template_of_today: Callable[[], str], tmp_path: Path) -> Iterator[Databases]:
    """Databases that a worker can serve."""
    with ExitStack() as stack:
        yield Databases(server, template_of_today(), tmp_path, stack)


@pytest.fixture
def start_fleet(start_worker: StartWorker, databases: Databases) -> StartFleet:
    """Return a function that starts a worker of these databases."""
    return StartFleet(start_worker, databases)
