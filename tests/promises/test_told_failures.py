"""A person is told of messages that failed for good, also of those whose worker did not live to tell."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

from tests.support.outbox_actions import enqueue
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from pathlib import Path

    import psycopg

    from tests.promises.conftest import StartWorker

APPLICATION = """
    import os

    from pgoutbox import Outbox, Permanent

    outbox = Outbox()


    @outbox.handler("mail")
    async def mail(message, ctx):
        raise Permanent(message.payload)


    @outbox.handler("pgoutbox.alert")
    async def tell(message, ctx):
        with open(os.environ["TOLD"], "a") as file:
            file.write(message.payload["cause"] + "\\n")
"""


def test_failures_of_a_killed_worker_are_told_at_the_start_of_the_next_one(
    db: psycopg.Connection, start_worker: StartWorker, tmp_path: Path
) -> None:
    told = tmp_path / "told"
    worker = start_worker(APPLICATION, environment={"TOLD": str(told)})
    enqueue(db, "mail", "the box is full")
    wait_until(lambda: told.exists() and told.read_text() == "the box is full\n", lambda: worker.log)
    # A worker that has just told one failure waits a minute before it tells the next one.
    second = enqueue(db, "mail", "the user is gone")
    state = "SELECT state FROM pgoutbox.message_view WHERE id = %s"
    wait_until(lambda: db.execute(state, [second]).fetchone() == ("failed",), lambda: worker.log)
    os.kill(worker.pid, signal.SIGKILL)
    worker.wait()
    another = start_worker(APPLICATION, environment={"TOLD": str(told)})
    wait_until(lambda: told.read_text() == "the box is full\nthe user is gone\n", lambda: another.log)
