"""An upgrade replaces the files of a package under its running workers."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pgoutbox
from tests.support.outbox_actions import enqueue
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    import psycopg

    from tests.promises.conftest import StartWorker

APPLICATION = """
    from pgoutbox import Outbox

    outbox = Outbox()


    @outbox.handler("mail")
    async def mail(message, ctx):
        pass
"""
SESSIONS = "FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE 'pgoutbox %'"


def test_a_worker_without_its_sql_files_delivers_and_reconnects(
    db: psycopg.Connection, start_worker: StartWorker, tmp_path: Path
) -> None:
    shutil.copytree(Path(pgoutbox.__file__).parent, tmp_path / "pgoutbox")
    worker = start_worker(APPLICATION, environment={"PYTHONSAFEPATH": "1"})

    def deliver() -> None:
        message_id = enqueue(db, "mail")
        state = "SELECT state FROM pgoutbox.message_view WHERE id = %s"
        wait_until(lambda: db.execute(state, [message_id]).fetchone() == ("sent",), lambda: worker.log)

    wait_until(lambda: "worker_started" in worker.events(), lambda: worker.log)
    files = list((tmp_path / "pgoutbox").rglob("*.sql"))
    assert files
    for file in files:
        file.unlink()
    deliver()
    db.execute(f"SELECT pg_terminate_backend(pid) {SESSIONS}".encode())
    deliver()
    assert worker.stop() == 0, worker.log
