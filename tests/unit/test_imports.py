"""What `import pgoutbox` costs, and what it needs: nothing but psycopg and pydantic."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pgoutbox

OPTIONAL = (
    "aiormq", "aiosmtplib", "alembic", "anyio", "apprise", "asyncpg", "confluent_kafka", "cryptography", "django",
    "email.mime", "httpcore", "httpx", "jinja2", "nats", "psycopg_pool", "pytest", "redis", "rich", "smtplib",
    "sqlalchemy", "starlette", "typer", "uvicorn",
)  # fmt: skip


def loaded_by(program: str, **environment: str) -> set[str]:
    """The names of the modules that are loaded after the program ran in an interpreter of its own."""
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
    assert not loaded_by("import pgoutbox.commands") & {"starlette", "uvicorn", "jinja2", "h11", "anyio"}


def test_an_application_with_an_outbox_can_be_imported_without_any_setting() -> None:
    program = """
import pgoutbox
outbox = pgoutbox.Outbox()
@outbox.handler(outbox.topic("mail.welcome"))
async def welcome(message, context): ...
"""
    assert "pgoutbox.outbox" in loaded_by(program, PGOUTBOX_LEASE_SECONDS="nonsense")


def test_every_public_name_is_there() -> None:
    assert sorted(pgoutbox.__all__) == list(pgoutbox.__all__)
    assert all(hasattr(pgoutbox, name) for name in pgoutbox.__all__)
