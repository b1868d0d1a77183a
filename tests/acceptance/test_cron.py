"""Runs the lines of the crontab in docs/how-to/cron.md with sh, as cron does: with nearly no environment."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
from typing import TYPE_CHECKING, Final

import pytest

from tests.support.dialogues import HOST
from tests.support.forks import LIBRARIES, forks
from tests.support.outbox_actions import attempts_of, enqueue, make_due, row_of
from tests.support.pages import DOCS, ROOT
from tests.support.smtp_server import accepting_server

if TYPE_CHECKING:
    from pathlib import Path

    import psycopg

PAGE: Final = (DOCS / "how-to" / "cron.md").read_text()
APPLICATION: Final = """
from pgoutbox import Context, Email, Message, Outbox, RetryPolicy

outbox = Outbox()


@outbox.handler("greet", retry=RetryPolicy.steps(60))
async def greet(message: Message, ctx: Context) -> Email:
    return Email(subject="Hello", text="Hello")
"""


def block(start: str) -> str:
    """Return the fenced block of the page that begins like this."""
    (found,) = re.findall(rf"```text\n({start}.*?)```", PAGE, re.DOTALL)
    return str(found)


class Host:
    """A host with the files of the page."""

    def __init__(self, folder: Path, dsn: str, smtp_port: int) -> None:
        self.folder = folder
        (folder / "club").mkdir()
        (folder / "club" / "messages.py").write_text(APPLICATION)
        bin_folder = folder / ".venv" / "bin"
        bin_folder.mkdir(parents=True)
        program = bin_folder / "pgoutbox"
        forked = forks(*LIBRARIES).script("-m", "pgoutbox")
        program.write_text(f'#!/bin/sh\nexport PYTHONPATH="{ROOT}"\n{forked}')
        program.chmod(0o700)
        environment = block("# worker.env")
        for name, value in (("DSN", dsn), ("SMTP_HOST", HOST), ("SMTP_SENDER", "club@club.test")):
            environment, count = re.subn(
                rf"^PGOUTBOX_{name}=.*$", f"PGOUTBOX_{name}='{value}'", environment, flags=re.MULTILINE
            )
            assert count == 1
        environment += f"PGOUTBOX_SMTP_PORT={smtp_port}\nPGOUTBOX_SMTP_SECURITY=none\n"
        (folder / "worker.env").write_text(environment)

    def run(self, number: int) -> subprocess.CompletedProcess[str]:
        """Run the command of a line of the crontab."""
        line = block(r"\* \* \* \* \*").splitlines()[number]
        command = line.split(maxsplit=5)[5].replace("/srv/club", str(self.folder))
        shell = shutil.which("sh")
        assert shell is not None
        return subprocess.run(
            [shell, "-c", command],
            env={"PATH": "/usr/bin:/bin", "HOME": str(self.folder), "LOGNAME": "club"},
            capture_output=True,
            text=True,
            check=False,
        )

    def runs(self) -> list[str]:
        """Return the lines that the log has about runs."""
        return [line for line in (self.folder / "worker.log").read_text().splitlines() if "run done" in line]


@pytest.mark.slow
async def test_the_crontab_outlives_a_dead_mail_server_and_delivers_after_the_repair(
    dsn: str, db: psycopg.Connection, tmp_path: Path
) -> None:
    async with accepting_server() as inbox:
        port = inbox.port
    host = Host(tmp_path, dsn, port)
    message_id = enqueue(db, destination="mailto:ada@example.org")
    for _ in range(3):
        done = host.run(0)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
        db.execute("UPDATE pgoutbox.breaker SET retry_at = now() - interval '1 second'")
        make_due(db, message_id)
    row = row_of(db, message_id)
    assert (row.state, row.max_attempts - row.attempt_count) == ("pending", 11)
    assert [outcome for _, outcome, _ in attempts_of(db, message_id)] == ["snoozed"] * 3
    (opened,) = [line for line in (tmp_path / "worker.log").read_text().splitlines() if "breaker opened" in line]
    assert "WARNING" in opened
    assert len(host.runs()) == 3
    async with accepting_server(port=port) as inbox:
        done = await asyncio.to_thread(host.run, 0)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
        assert len(inbox.received) == 1
    assert row_of(db, message_id).state == "sent"
    assert "sent=1 failed=0" in host.runs()[-1]


@pytest.mark.slow
def test_the_doctor_of_the_crontab_does_not_miss_a_connected_worker(
    dsn: str, db: psycopg.Connection, tmp_path: Path
) -> None:
    host = Host(tmp_path, dsn, 2525)
    host.run(0)
    host.run(1)
    assert "no worker is running" not in (tmp_path / "doctor.txt").read_text()
    lines = subprocess.run(
        [str(tmp_path / ".venv" / "bin" / "pgoutbox"), "doctor", "--json"],
        env={"PATH": "/usr/bin:/bin", "PGOUTBOX_DSN": dsn},
        capture_output=True,
        text=True,
        check=False,
    ).stdout.splitlines()
    levels = [finding["level"] for finding in map(json.loads, lines) if finding["check"] == "workers"]
    assert levels == ["ok"]


@pytest.mark.slow
def test_a_run_without_a_log_file_writes_warnings_only(dsn: str, db: psycopg.Connection, tmp_path: Path) -> None:
    host = Host(tmp_path, dsn, 2525)
    with (tmp_path / "worker.env").open("a") as file:
        file.write("unset PGOUTBOX_LOG_FILE\n")
    done = host.run(0)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    for _ in range(5):  # Five failures in a row open the breaker.
        enqueue(db, destination="mailto:ada@example.org")
    done = host.run(0)
    (line,) = done.stderr.splitlines()
    assert "WARNING" in line
    assert "breaker opened" in line


@pytest.mark.slow
def test_without_set_a_the_settings_do_not_reach_the_command(dsn: str, tmp_path: Path) -> None:
    host = Host(tmp_path, dsn, 2525)
    plain = block(r"\* \* \* \* \*").splitlines()[0].split(maxsplit=5)[5].replace("set -a && ", "")
    shell = shutil.which("sh")
    assert shell is not None
    done = subprocess.run(
        [shell, "-c", plain.replace("/srv/club", str(host.folder))],
        env={"PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "PGOUTBOX_DSN" in done.stderr
