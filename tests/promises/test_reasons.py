"""The log, the command line and the views show why a message failed, also where the application hides fields."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pgoutbox import Outbox
from tests.support.forks import run_command
from tests.support.waiting import PROCESS_PATIENCE_SECONDS
from tests.support.worker_process import environment_with

if TYPE_CHECKING:
    import psycopg

    from tests.promises.conftest import StartWorker

APPLICATION: Final = """
    from pgoutbox import Email, Message, Outbox, RawEmail, Topic

    outbox = Outbox()
    outbox.define(Topic("raw", redact=("data", "email", "to")))
    outbox.define(Topic("nobody", redact=("email", "to")))

    @outbox.handler("raw")
    async def send(message: Message, ctx: object) -> RawEmail:
        return RawEmail(data=b"Subject: " + b"x" * 3000 + b"\\r\\n\\r\\n", to="ann@x.test", envelope_sender="")

    @outbox.handler("nobody")
    async def send_to_nobody(message: Message, ctx: object) -> Email:
        return Email(subject="Hello", text="Hello")

    @outbox.handler("lookup", permanent=[KeyError])
    async def look_up(message: Message, ctx: object) -> None:
        message.payload["vat_id"]

    @outbox.handler("secret", permanent=[ValueError])
    async def reveal(message: Message, ctx: object) -> None:
        raise ValueError("email.password: hunter2")
"""
TOO_LONG: Final = "raw_email.data: line 1 has 3009 bytes, the limit is 998; encode the body"
NOBODY: Final = "email.to: no recipient"


def test_a_reason_of_pgoutbox_is_shown_everywhere(start_worker: StartWorker, db: psycopg.Connection, dsn: str) -> None:
    with db.transaction():
        for topic in ("raw", "nobody", "lookup", "secret"):
            Outbox().on(db).enqueue(topic, {})
    worker = start_worker(APPLICATION, "--drain", mail_transport="log", smtp_sender="club@x.test")
    assert worker.wait(PROCESS_PATIENCE_SECONDS) == 0
    assert TOO_LONG in worker.log
    assert NOBODY in worker.log
    assert "hunter2" not in worker.log

    settings = environment_with(dsn=dsn, redact="data,to,email")
    shown = {}
    for arguments in (("failures",), ("show", "1"), ("doctor",)):
        done = run_command("-m", "pgoutbox", *arguments, "--json", cwd=Path.cwd(), env=settings)
        shown[arguments[0]] = done.stdout
    assert TOO_LONG in shown["show"]
    causes = [json.loads(line)["cause"] for line in shown["failures"].splitlines()]
    assert "KeyError: 'vat_id'" in causes
    assert any(cause.startswith(NOBODY) for cause in causes)
    assert any(cause.startswith("raw_email.data: line ") for cause in causes)
    assert "hunter2" not in "".join(shown.values())

    rows = db.execute("SELECT topic, last_error, cause FROM pgoutbox.message_view ORDER BY id").fetchall()
    assert rows[0][1] == TOO_LONG
    assert rows[2][1:] == ("KeyError: 'vat_id'", "KeyError: 'vat_id'")
    assert "hunter2" not in str(rows)
