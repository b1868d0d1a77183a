"""Databases with names in a file, and a worker that serves all of them, for the tests of many databases."""

from __future__ import annotations

import re
from contextlib import contextmanager
from typing import TYPE_CHECKING

import psycopg

from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import ExitStack
    from pathlib import Path

    from tests.conftest import Server
    from tests.promises.conftest import StartWorker
    from tests.support.worker_process import WorkerProcess

APPLICATION = """
    import os
    import time
    from pathlib import Path

    from pgoutbox import Outbox, Permanent

    outbox = Outbox()
    folder = Path(os.environ["FOLDER"])

    def note(message):
        with (folder / "handled").open("a") as handled:
            handled.write(f"{message.database} {message.topic} {message.id}\\n")

    @outbox.handler("single")
    async def single(message, context):
        note(message)

    @outbox.handler("fails")
    async def fails(message, context):
        return Permanent("no")

    @outbox.on_failed("fails")
    async def failed(message, context):
        note(message)

    @outbox.handler("waits")
    def waits(message, context):
        began = folder / f"began-{message.database}-{message.id}"
        began.touch()
        while not ((folder / "gate").exists() or (folder / f"go-{began.name}").exists()):
            time.sleep(0.02)
        note(message)
"""
# Neither a sweep nor another poll finds a message in time.
_ONLY_TOLD = {"poll_interval_seconds": "3600"}


class Databases:
    """Databases with names, in a file that a worker reads."""

    def __init__(self, server: Server, template: str, folder: Path, stack: ExitStack) -> None:
        self._server = server
        self._template = template
        self._stack = stack
        self._dsns: dict[str, str] = {}
        self._sessions: dict[str, psycopg.Connection] = {}
        self.folder = folder
        self.file = folder / "databases"

    def add(self, *names: str, template: str | None = None) -> None:
        """Create databases and list them."""
        for name in names:
            database = self._stack.enter_context(self._server.database(template=template or self._template))
            self._dsns[name] = self._server.dsn_for(database)
        self._write()

    def list(self, name: str, dsn: str) -> None:
        """List a database with this DSN."""
        self._dsns[name] = dsn
        self._write()

    def remove(self, name: str) -> None:
        """Take a database from the list."""
        del self._dsns[name]
        self._write()

    def _write(self) -> None:
        text = "".join(f"{name} {dsn}\n" for name, dsn in self._dsns.items())
        new = self.file.with_suffix(".new")
        new.write_text(text)
        new.rename(self.file)

    def __getitem__(self, name: str) -> psycopg.Connection:
        """Return a session in autocommit mode."""
        if name not in self._sessions:
            self._sessions[name] = self._stack.enter_context(psycopg.connect(self._dsns[name], autocommit=True))
        return self._sessions[name]

    def dsn(self, name: str) -> str:
        return self._dsns[name]

    def enqueue(self, name: str, topic: str = "single", count: int = 1) -> None:
        """Enqueue messages in a database."""
        self[name].execute("SELECT pgoutbox.enqueue(%s, to_jsonb(n)) FROM generate_series(1, %s) AS n", (topic, count))

    def handled(self) -> Sequence[str]:
        """Return database and topic of each handled message, in their order."""
        path = self.folder / "handled"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line.rpartition(" ")[0] for line in lines]

    def began(self) -> Sequence[str]:
        """Return the database of each message whose handler has begun to wait."""
        return sorted(re.findall("^began-(.*)-", path.name)[0] for path in self.folder.glob("began-*"))

    def go_on(self) -> str:
        """Let the last handler that waits go on, and return its database."""
        (name,) = [path.name for path in self.folder.glob("began-*") if not (self.folder / f"go-{path.name}").exists()]
        (self.folder / f"go-{name}").touch()
        return str(re.findall("began-(.*)-", name)[0])

    def open_gate(self) -> None:
        """Let the waiting handlers go on, and those that begin later."""
        (self.folder / "gate").touch()

    def sessions(self) -> Sequence[tuple[str, int]]:
        """Return the number of pgoutbox's sessions in each listed database that exists."""
        counts = {
            name: self[name]
            .execute(
                "SELECT count(*) FROM pg_stat_activity"
                " WHERE datname = current_database() AND application_name LIKE 'pgoutbox %'"
            )
            .fetchone()
            for name in self._dsns
        }
        return [(name, count[0]) for name, count in counts.items() if count is not None]


class StartFleet:
    """Starts a worker of these databases, which only notifications wake."""

    def __init__(self, start: StartWorker, databases: Databases) -> None:
        self._start = start
        self._databases = databases

    def __call__(self, *arguments: str, **settings: str) -> WorkerProcess:
        given = {"dsns": str(self._databases.file), **_ONLY_TOLD, **settings}
        return self._start(
            APPLICATION, *arguments, environment={"FOLDER": str(self._databases.folder)}, dsn=None, **given
        )


def until_handled(databases: Databases, worker: WorkerProcess, expected: Sequence[str]) -> None:
    """Wait until exactly these messages are handled, in any order."""
    wait_until(
        lambda: sorted(databases.handled()) == sorted(expected),
        lambda: f"handled are {sorted(databases.handled())}, not {sorted(expected)}\n{worker.log}",
    )


@contextmanager
def locked(dsn: str) -> Iterator[None]:
    """Lock the messages of a database."""
    with psycopg.connect(dsn) as session:
        session.execute("LOCK TABLE pgoutbox.message_live IN ACCESS EXCLUSIVE MODE")
        yield
