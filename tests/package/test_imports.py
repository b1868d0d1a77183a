"""Tests that `import pgoutbox` loads nothing but psycopg and pydantic."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

import pgoutbox

pytestmark = pytest.mark.slow

OPTIONAL = (
    "aiormq", "aiosmtplib", "alembic", "anyio", "apprise", "argon2", "asyncpg", "confluent_kafka", "cryptography",
    "django", "email.mime", "h11", "http.server", "httpx", "itsdangerous", "jinja2", "nats",
    "opentelemetry", "prometheus_client", "pytest", "python_multipart", "redis", "rich", "smtplib",
    "sqlalchemy", "starlette", "typer", "uvicorn",
)  # fmt: skip


def loaded_by(program: str, **environment: str) -> set[str]:
    """Return the names of the modules that are loaded after the program ran in a separate interpreter."""
    result = subprocess.run(
        [sys.executable, "-c", f"{program}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"],
        capture_output=True,
        text=True,
        check=True,
        env={"PATH": os.environ["PATH"], **environment},
    )
    assert result.stderr == ""
    return set(json.loads(result.stdout))


def test_the_import_loads_no_optional_dependency() -> None:
    assert not loaded_by("import pgoutbox") & set(OPTIONAL)


def test_the_commands_do_not_load_the_dashboard() -> None:
    assert not loaded_by("import pgoutbox.cli.commands") & {"starlette", "uvicorn", "jinja2", "h11", "anyio", "argon2"}


def test_an_application_with_an_outbox_can_be_imported_without_any_setting() -> None:
    program = """
import pytest

import pgoutbox
outbox = pgoutbox.Outbox()
@outbox.handler(outbox.define(pgoutbox.Topic("mail.welcome")))
async def welcome(message, context): ...
"""
    assert "pgoutbox.outbox" in loaded_by(program, PGOUTBOX_LEASE_SECONDS="nonsense")


def test_every_public_name_can_be_imported() -> None:
    assert sorted(pgoutbox.__all__) == list(pgoutbox.__all__)
    assert all(hasattr(pgoutbox, name) for name in pgoutbox.__all__)


def test_a_worker_without_metrics_and_traces_loads_neither() -> None:
    program = """
import asyncio
import psycopg
from pgoutbox import Outbox, Settings
from pgoutbox.worker import Worker
outbox = Outbox(Settings(dsn="host=127.0.0.1 port=1"))
@outbox.handler("greet")
async def greet(message, context): ...
try:
    asyncio.run(Worker(outbox).run_once())
except psycopg.OperationalError:
    pass
"""
    assert not loaded_by(program) & {"http.server", "opentelemetry", "prometheus_client"}


def test_metrics_without_their_extra_end_the_worker_with_the_install_command() -> None:
    program = """
import sys
sys.modules["prometheus_client"] = None
from pgoutbox.cli.main import main
sys.exit(main(["worker", "--app", "tests.support.app:outbox"]))
"""
    result = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={
            "PATH": os.environ["PATH"],
            "PYTHONPATH": os.pathsep.join(sys.path),
            "PGOUTBOX_DSN": "host=127.0.0.1 port=1",
            "PGOUTBOX_METRICS_ADDRESS": "127.0.0.1:0",
        },
    )
    assert result.returncode == 2
    assert result.stderr == (
        "error: serving metrics (PGOUTBOX_METRICS_ADDRESS) needs an optional dependency: "
        "pip install 'pgoutbox[metrics]'\n"
    )
