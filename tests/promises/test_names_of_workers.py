"""Every run of a worker has a name of its own, wherever the `Worker` was made: the fence rests on it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING

import pytest

from pgoutbox import Context, Message, Outbox, Worker
from tests.support.outbox_actions import enqueue, settings_for
from tests.support.waiting import until
from tests.support.worker_process import environment_with

if TYPE_CHECKING:
    from pathlib import Path

    import psycopg

# The parent makes the worker, like a web server that loads its application before it forks.
PROGRAM = """
    import asyncio
    import os

    from pgoutbox import Outbox, Worker

    outbox = Outbox()


    @outbox.handler("works")
    async def works(message, ctx):
        open(f"{os.environ['CALLED']}/{message.id}", "w").close()
        while len(os.listdir(os.environ["CALLED"])) < 2:
            await asyncio.sleep(0.05)


    worker = Worker(outbox)
    children = []
    for _ in range(2):
        child = os.fork()
        if child == 0:
            asyncio.run(worker.run_once(max_messages=1))
            os._exit(0)
        children.append(child)
    raise SystemExit(any(os.waitpid(child, 0)[1] for child in children))
"""


@pytest.mark.slow
def test_two_children_of_a_process_that_made_the_worker_have_two_names(
    dsn: str, db: psycopg.Connection, tmp_path: Path
) -> None:
    called = tmp_path / "called"
    called.mkdir()
    ids = [enqueue(db, "works") for _ in range(2)]
    environment = environment_with(dsn=dsn, lease_seconds="60") | {"CALLED": str(called)}
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM)], env=environment, timeout=120, check=False, capture_output=True
    )
    assert run.returncode == 0, run.stderr.decode()
    rows = db.execute("SELECT id, state, worker FROM pgoutbox.message_view ORDER BY id").fetchall()
    assert [(message_id, state) for message_id, state, _ in rows] == [(message_id, "sent") for message_id in ids]
    assert len({worker for *_, worker in rows}) == 2


async def test_two_runs_that_start_together_have_two_names(dsn: str, db: psycopg.Connection) -> None:
    outbox, calls = Outbox(settings_for(dsn)), list[int]()

    @outbox.handler("works")
    async def works(message: Message, ctx: Context) -> None:
        calls.append(message.id)
        await until(lambda: len(calls) == 2)

    for _ in range(2):
        enqueue(db, "works")
    worker = Worker(outbox)
    await asyncio.gather(*(worker.run_once(max_messages=1) for _ in range(2)))
    rows = db.execute("SELECT state, worker FROM pgoutbox.message_view").fetchall()
    assert [state for state, _ in rows] == ["sent", "sent"]
    assert len({name for _, name in rows}) == 2
