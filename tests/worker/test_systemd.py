"""Tests the notifications to systemd on a real socket of its protocol."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

import pytest

from pgoutbox import Outbox
from pgoutbox.handlers import Context
from pgoutbox.message import Message
from pgoutbox.observability import systemd
from pgoutbox.worker import Worker
from pgoutbox.worker.multi_worker import MultiWorker
from tests.support.outbox_actions import running, settings_for
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class Systemd:
    """The receiving end of $NOTIFY_SOCKET."""

    def __init__(self, address: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.setblocking(False)
        self.socket.bind(address)
        self.heard: list[dict[str, str]] = []

    def listen(self) -> list[dict[str, str]]:
        """Return all messages so far."""
        while True:
            try:
                text = self.socket.recv(4096).decode()
            except BlockingIOError:
                return self.heard
            self.heard.append(dict(line.split("=", 1) for line in text.split("\n")))

    def has_heard(self, name: str, value: str = "1") -> bool:
        return any(heard.get(name) == value for heard in self.listen())


@pytest.fixture(params=["path", "abstract"])
def init(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Systemd]:
    address = str(tmp_path / "notify") if request.param == "path" else f"@pgoutbox-test-{os.getpid()}"
    monkeypatch.setenv("NOTIFY_SOCKET", address)
    found = Systemd(address.replace("@", "\0"))
    yield found
    found.socket.close()


async def test_a_worker_notifies_when_it_is_ready_alive_and_stopping(
    outbox: Outbox, init: Systemd, monkeypatch: pytest.MonkeyPatch
) -> None:
    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None: ...

    monkeypatch.setenv("WATCHDOG_USEC", "20000")
    monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()))
    worker = Worker(outbox)
    async with running(worker):
        await until(lambda: init.has_heard("READY"))
        assert worker.status().is_started
        await until(lambda: sum("WATCHDOG" in heard for heard in init.listen()) >= 3)
        assert not init.has_heard("STOPPING")
    assert init.has_heard("STOPPING")
    assert next(iter(init.heard)) == {"READY": "1", "STATUS": "at work"}


async def test_a_worker_of_many_databases_is_ready_when_it_serves_the_first(
    dsn: str, tmp_path: Path, init: Systemd, monkeypatch: pytest.MonkeyPatch
) -> None:
    databases = tmp_path / "databases"
    databases.write_text("dead host=127.0.0.1 port=9 dbname=none\n")
    outbox = Outbox(settings_for(dsn, dsns=str(databases)).model_copy(update={"dsn": None}))

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None: ...

    monkeypatch.setenv("WATCHDOG_USEC", "20000")
    monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()))
    worker = MultiWorker(outbox)
    async with running(worker):
        await until(lambda: worker.status().databases and worker.status().databases["dead"].failure)
        assert not init.listen()
        with databases.open("a") as listed:
            listed.write(f"one {dsn}\n")
        worker.read_databases()
        await until(lambda: init.has_heard("READY"))
        assert worker.status().is_started
        await until(lambda: sum("WATCHDOG" in heard for heard in init.listen()) >= 3)
        assert not init.has_heard("STOPPING")
    assert init.has_heard("STOPPING")


async def test_a_cron_run_sends_no_notifications(outbox: Outbox, init: Systemd) -> None:
    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None: ...

    await Worker(outbox).run_once()
    assert init.listen() == []


def test_without_systemd_the_worker_runs_normally(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    assert not systemd.notify(READY=1)
    for address in (str(tmp_path / "gone"), "relative", "@nobody-listens-here", f"/{'x' * 200}"):
        monkeypatch.setenv("NOTIFY_SOCKET", address)
        assert not systemd.notify(READY=1)


@pytest.mark.parametrize(
    ("usec", "pid", "seconds"),
    [
        ("30000000", None, 15.0),
        ("30000000", "own", 15.0),
        ("30000000", "1", None),
        ("0", None, None),
        ("x", None, None),
    ],
)
def test_the_watchdog_is_fed_at_half_its_interval_if_it_watches_this_process(
    usec: str, pid: str | None, seconds: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", usec)
    monkeypatch.delenv("WATCHDOG_PID", raising=False)
    if pid is not None:
        monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()) if pid == "own" else pid)
    assert systemd.watchdog_seconds() == seconds
