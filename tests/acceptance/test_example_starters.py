"""Tests that the pages on web frameworks work as written: from the two files to a green test and a delivered e-mail."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import psycopg
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from pgoutbox import Outbox
from tests.support.brokers import accepts
from tests.support.example_shell import ROOT, states
from tests.support.pages import DOCS, blocks_of
from tests.support.ports import free_port
from tests.support.waiting import PROCESS_PATIENCE_SECONDS, wait_until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from tests.conftest import Server

pytestmark = pytest.mark.slow

# The files that the reader of a page saves.
FILES: Final = {
    "fastapi": ("fastapi_app.py", "test_fastapi_app.py"),
    "litestar": ("litestar_app.py", "test_litestar_app.py"),
    "flask": ("flask_app.py", "test_flask_app.py"),
}
DSN_OF_THE_PAGE: Final = "postgresql://app@localhost/app"
TOKEN: Final = "a-token-of-20-characters-or-more"


@dataclass(frozen=True, slots=True)
class Reader:
    """A reader of a page: saves its files in an empty directory, and types its commands."""

    framework: str
    directory: Path
    dsn: str
    environment: dict[str, str]
    port: int

    def typed(self, action: str) -> str:
        (block,) = [b for b in blocks_of(DOCS / f"how-to/{self.framework}.md", "sh") if b.directive == f"run: {action}"]
        text = block.text.replace(DSN_OF_THE_PAGE, f"'{self.dsn}'")
        return text.replace(":8000/", f":{self.port}/").replace(":5000/", f":{self.port}/")

    async def run(self, action: str, **environment: str) -> str:
        process = await self._start(self.typed(action), "typed.log", environment)
        code = await asyncio.wait_for(process.wait(), PROCESS_PATIENCE_SECONDS)
        assert code == 0, self.log("typed")
        return self.log("typed")

    @asynccontextmanager
    async def running(self, typed: str, log: str) -> AsyncIterator[asyncio.subprocess.Process]:
        """Run commands of which the last one starts a program, until it has answered SIGTERM."""
        *before, last = typed.splitlines()
        process = await self._start("\n".join(["set -e", *before, f"exec {last}"]), f"{log}.log", {})
        try:
            yield process
        finally:
            if process.returncode is None:
                process.terminate()
            await asyncio.wait_for(process.wait(), PROCESS_PATIENCE_SECONDS)

    async def until(self, condition: Callable[[], object]) -> None:
        await asyncio.to_thread(wait_until, condition, lambda: self.log("server"))

    def log(self, name: str) -> str:
        return (self.directory / f"{name}.log").read_text()

    async def _start(self, script: str, log: str, environment: dict[str, str]) -> asyncio.subprocess.Process:
        with (self.directory / log).open("w") as output:
            return await asyncio.create_subprocess_exec(
                "bash",
                "-c",
                script,
                cwd=self.directory,
                env=self.environment | environment,
                stdout=output,
                stderr=asyncio.subprocess.STDOUT,
            )


@pytest.fixture
def reader(request: pytest.FixtureRequest, dsn: str, server: Server, tmp_path: Path) -> Reader:
    framework: str = request.param
    for name in FILES[framework]:
        shutil.copy(ROOT / "examples" / name, tmp_path)
    port = free_port()
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PGOUTBOX_", "PYTEST_"))}
    environment |= {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "UVICORN_PORT": str(port),
        "FLASK_RUN_PORT": str(port),
        "PGOUTBOX_TEST_DSN": server.dsn_for(server.maintenance_dbname),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # A reader does not have the plugins of this project.
        "PYTEST_PLUGINS": "pgoutbox.testing",
    }
    return Reader(framework, tmp_path, dsn, environment, port)


@pytest.mark.parametrize("reader", FILES, indirect=True)
async def test_a_page_leads_to_a_green_test_and_a_delivered_mail(reader: Reader, dsn: str) -> None:
    with psycopg.connect(dsn) as connection:
        Outbox().on(connection).enqueue("mail.welcome", None, destination="mailto:developer@example.org")
    # Its tests do not deliver from the database of the developer.
    assert "2 passed" in await reader.run("test", PGOUTBOX_DSN=dsn, PGOUTBOX_MAIL_TRANSPORT="log")
    assert states(dsn) == {"pending": 1}

    async with reader.running(reader.typed("serve"), "server"):
        await reader.until(lambda: accepts(reader.port))
        await reader.run("ask")
        if reader.framework == "flask":
            async with reader.running(reader.typed("work"), "worker"):
                await reader.until(lambda: states(dsn) == {"sent": 2})
        else:
            await reader.until(lambda: states(dsn) == {"sent": 2})
    log = reader.log("worker" if reader.framework == "flask" else "server")
    assert log.count("event=email_logged") == 2, log
    assert "ada@example.org" in log


@pytest.mark.parametrize("reader", ["fastapi"], indirect=True)
async def test_a_web_application_ends_if_its_worker_fails(reader: Reader, empty_dsn: str) -> None:
    exports = f"export PGOUTBOX_DSN='{empty_dsn}' DATABASE_URL='{empty_dsn.replace(':', '+psycopg:', 1)}'"
    async with reader.running(f"{exports}\nuvicorn {reader.framework}_app:app", "server") as process:
        assert await asyncio.wait_for(process.wait(), PROCESS_PATIENCE_SECONDS) == -signal.SIGTERM
    log = reader.log("server")
    assert "worker failed, the application stops event=worker_failed" in log
    assert "Application shutdown failed" in log
    assert "Traceback" in log


def test_the_dashboard_is_mounted_in_the_application(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = [b for b in blocks_of(DOCS / "how-to/fastapi.md", "python") if b.file_name == "dashboard_app.py"]
    monkeypatch.syspath_prepend(ROOT / "examples")
    monkeypatch.setenv("PGOUTBOX_DSN", dsn)
    monkeypatch.setenv("PGOUTBOX_WEB_OPERATOR_TOKENS", f"ada:{TOKEN}")
    names: dict[str, object] = {}
    exec(compile(block.text, block.place, "exec", dont_inherit=True), names)
    application = names["app"]
    assert isinstance(application, FastAPI)
    try:
        web = TestClient(application, base_url="http://localhost")
        assert "mail.welcome" in web.get("/outbox/topics", headers={"Authorization": f"Bearer {TOKEN}"}).text
    finally:
        del sys.modules["fastapi_app"]
