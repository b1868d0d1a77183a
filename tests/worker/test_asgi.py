"""Tests of `lifespan`: a worker runs beside a web application, ends with it, and does not fail quietly."""

from __future__ import annotations

import asyncio
import logging
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

from pgoutbox import Context, Message, Outbox, SchemaError, Settings, lifespan
from pgoutbox.worker import asgi
from tests.support.outbox_actions import enqueue, rows_of, settings_for
from tests.support.waiting import until, wait_until

if TYPE_CHECKING:
    import psycopg


def outbox_of(dsn: str) -> Outbox:
    outbox = Outbox(settings_for(dsn))

    @outbox.handler("greet")
    async def greet(message: Message, ctx: Context) -> None:
        pass

    return outbox


@pytest.fixture
def _outside_pytest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asgi, "is_under_pytest", False)


@pytest.mark.slow
@pytest.mark.usefixtures("_outside_pytest")
async def test_a_worker_delivers_while_the_application_runs(db: psycopg.Connection, dsn: str) -> None:
    run = lifespan(outbox_of(dsn))
    for _ in range(2):  # Test clients start the same application several times.
        async with run(None):
            enqueue(db)
            await until(lambda: {row.state for row in rows_of(db)} == {"sent"})
    assert [task for task in asyncio.all_tasks() if task.get_name().startswith("pgoutbox")] == []


@pytest.mark.usefixtures("_outside_pytest")
def test_a_test_client_gets_the_error_of_the_worker(empty_dsn: str, caplog: pytest.LogCaptureFixture) -> None:
    app = Starlette(lifespan=lifespan(outbox_of(empty_dsn)))
    with pytest.raises(SchemaError, match="pgoutbox migrate"), TestClient(app):
        wait_until(lambda: caplog.records, lambda: "no log")
    (record,) = caplog.records
    assert (record.levelno, record.__dict__["event"]) == (logging.CRITICAL, "worker_failed")
    assert "pgoutbox migrate" in record.getMessage()


@pytest.mark.slow
def test_a_failed_worker_ends_a_process_that_does_not_handle_the_signal(empty_dsn: str) -> None:
    program = """
import asyncio, sys
from pgoutbox import Outbox, Settings, lifespan
outbox = Outbox(Settings(dsn=sys.argv[1]))
@outbox.handler("greet")
async def greet(message, context): ...
async def serve():
    async with lifespan(outbox)(None):
        await asyncio.Event().wait()
asyncio.run(serve())
"""
    done = subprocess.run([sys.executable, "-c", program, empty_dsn], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "worker failed, the application stops" in done.stderr
    assert "run: pgoutbox migrate" in done.stderr


@pytest.mark.usefixtures("_outside_pytest")
async def test_a_failed_worker_stops_the_web_server_by_its_signal(empty_dsn: str) -> None:
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    try:
        with pytest.raises(SchemaError):
            async with lifespan(outbox_of(empty_dsn))(None):
                await stopped.wait()
    finally:
        asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM)


@pytest.mark.usefixtures("_outside_pytest")
async def test_an_outbox_without_handlers_does_not_start() -> None:
    with pytest.raises(Exception, match="the outbox has no handlers"):
        async with lifespan(Outbox(Settings(dsn="host=127.0.0.1 port=1")))(None):
            pytest.fail("it has started")


async def test_under_the_plugin_no_worker_starts_and_the_log_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PGOUTBOX_LEASE_SECONDS", "nonsense")  # Settings that are read raise an error.
    before = asyncio.all_tasks()
    async with lifespan(Outbox())(None):
        assert asyncio.all_tasks() == before
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "`run_pass` of the fixture `pgoutbox_driver`" in record.getMessage()
