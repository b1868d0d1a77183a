"""Tests with a canary under sensitive names: it is in the payload's row, and in no output for people."""

from __future__ import annotations

import json
import logging
import os
import sys
from typing import TYPE_CHECKING

import pytest
from cryptography.fernet import Fernet

from pgoutbox import Outbox, Topic
from pgoutbox.handlers import Context, SyncContext
from pgoutbox.message import Message, Permanent, Skip
from pgoutbox.options import MessageOptions
from pgoutbox.retry import RetryPolicy
from pgoutbox.worker import Worker
from tests.support.forks import run_command
from tests.support.outbox_actions import attempts_of, row_of, settings_for

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import psycopg

CANARY = "c4n4ry-s3cret"
PAYLOAD = {
    "to": "ann",
    "reset_token": CANARY,
    "nested": [{"Password": CANARY, "deep": {"api-key": [CANARY]}}],
    "user": {"email": CANARY},
    "iban": CANARY,
}
OPTIONS: MessageOptions = {
    "headers": {"Authorization": f"Bearer {CANARY}", "x-api-key": CANARY, "trace": "7"},
    "destination": f"https://ann:{CANARY}@example.org/hook?token={CANARY}",
}
APP = """
from pgoutbox import Outbox, Topic

outbox = Outbox()
outbox.define(Topic("reset", redact=("user.email",)))
outbox.define(Topic("sealed", encrypted=True))
"""
KEY = Fernet.generate_key().decode()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Create a directory with the module of the application for the command line."""
    (tmp_path / "canary_app.py").write_text(APP)
    return tmp_path


def pgoutbox(dsn: str, directory: Path, *arguments: object, app: bool = True) -> str:
    """Return everything that a command prints in a separate process, with the log at DEBUG."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PGOUTBOX_")}
    environment |= {
        "PGOUTBOX_DSN": dsn,
        "PGOUTBOX_REDACT": "iban",
        "PGOUTBOX_LOG_LEVEL": "DEBUG",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    if app:
        environment["PGOUTBOX_APP"] = "canary_app:outbox"
    done = run_command("-m", "pgoutbox", *map(str, arguments), cwd=directory, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def quoting(message: Message) -> str:
    """Return the error text of a careless handler."""
    return f"refused {message.payload!r} with {json.dumps(dict(message.headers))} by {message.destination}"


def register(outbox: Outbox, kind: str, topic: str = "reset") -> None:
    """Register a handler that quotes its whole message in its error."""
    if kind == "raises":

        @outbox.handler(topic, retry=RetryPolicy.steps(3600, jitter=0))
        async def fail(message: Message, ctx: Context) -> None:
            raise ValueError(quoting(message))

    elif kind == "fails in a thread":

        @outbox.handler(topic)
        def fail_for_good(message: Message, ctx: SyncContext) -> Permanent:
            return Permanent(quoting(message))

    elif kind == "skips":

        @outbox.handler(topic, transactional=True)
        async def skip(message: Message, ctx: Context) -> Skip:
            return Skip(quoting(message))

    else:

        @outbox.batch_handler(topic)
        async def fail_all(messages: Sequence[Message], contexts: Sequence[Context]) -> list[Permanent]:
            return [Permanent(quoting(message)) for message in messages]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["raises", "fails in a thread", "skips", "fails in a batch"])
async def test_no_output_contains_the_canary(
    dsn: str, db: psycopg.Connection, directory: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    caplog.set_level(logging.DEBUG)
    outbox = Outbox(settings_for(dsn, redact="iban"))
    outbox.define(Topic("reset", redact=("user.email",)))
    register(outbox, kind)
    with db.transaction():
        message_id = outbox.on(db).enqueue("reset", PAYLOAD, **OPTIONS).id
    await Worker(outbox).run_once()
    row = row_of(db, message_id)
    written = [str(row.last_error), str(row.skip_reason), str(attempts_of(db, message_id))]
    assert "refused {'to': 'ann'" in "".join(written)
    shown = [
        pgoutbox(dsn, directory, command, *arguments, *options)
        for command, *arguments in (["list"], ["show", message_id], ["stats"])
        for options in ([], ["--json"])
    ]
    assert "'to': 'ann'" in "".join(shown)
    for text in [*written, *shown, caplog.text]:
        assert CANARY not in text
    assert CANARY in str(db.execute("SELECT payload, headers, destination FROM pgoutbox.message").fetchall())


@pytest.mark.slow
def test_without_the_application_the_default_and_configured_names_apply(
    dsn: str, db: psycopg.Connection, directory: Path
) -> None:
    with db.transaction():
        message_id = Outbox(settings_for(dsn)).on(db).enqueue("reset", PAYLOAD, **OPTIONS).id
    shown = json.loads(pgoutbox(dsn, directory, "show", message_id, "--json", app=False))
    assert shown["payload"] == {
        "to": "ann",
        "reset_token": "(redacted)",
        "nested": [{"Password": "(redacted)", "deep": {"api-key": "(redacted)"}}],
        "user": {"email": CANARY},
        "iban": "(redacted)",
    }
    assert shown["headers"] == {"Authorization": "(redacted)", "x-api-key": "(redacted)", "trace": "7"}
    assert shown["destination"] == "https://(redacted)@example.org/hook?token=(redacted)"


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_an_encrypted_payload_is_shown_as_encrypted(
    dsn: str, db: psycopg.Connection, directory: Path, options: list[str]
) -> None:
    outbox = Outbox(settings_for(dsn, encryption_keys=KEY))
    outbox.define(Topic("sealed", encrypted=True))
    with db.transaction():
        message_id = outbox.on(db).enqueue("sealed", CANARY).id
    (token,) = db.execute("SELECT payload #>> '{pgoutbox.encrypted,token}' FROM pgoutbox.message").fetchone() or ("",)
    shown = pgoutbox(dsn, directory, "show", message_id, *options)
    assert "(encrypted)" in shown
    assert token not in shown
    assert token not in pgoutbox(dsn, directory, "list", *options)
