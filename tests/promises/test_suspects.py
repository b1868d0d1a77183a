"""Messages beside the death of a worker: they are tried again, and wait neither for a hanging one nor for each other
without a reason.
"""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

from tests.support.outbox_actions import enqueue
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import psycopg

    from tests.promises.conftest import StartWorker

# Each handler appends the id of its message to a file. All messages may be lost once, so each is then a suspect.
APPLICATION = """
    import asyncio
    import os
    import signal
    import time

    from pgoutbox import Outbox

    outbox = Outbox()


    def note(message):
        with open(os.environ["BEGUN"], "a") as file:
            file.write(f"{message.id} {message.attempt_count}\\n")


    @outbox.handler("crashes")
    async def crashes(message, ctx):
        os.kill(os.getpid(), signal.SIGKILL)


    @outbox.handler("hangs", timeout=0.5)
    def hangs(message, ctx):
        note(message)
        time.sleep(3600)


    @outbox.handler("stays")
    async def stays(message, ctx):
        note(message)
        await asyncio.sleep(3600)


    @outbox.handler("recovers")
    async def recovers(message, ctx):
        note(message)
        if message.attempt_count == 1:
            await asyncio.sleep(3600)


    @outbox.handler("works")
    async def works(message, ctx):
        note(message)
"""


@pytest.fixture
def begun(tmp_path: Path) -> Path:
    """Return the file with the id and number of each attempt that has begun."""
    path = tmp_path / "begun"
    path.touch()
    return path


def is_sent(db: psycopg.Connection, message_id: int) -> bool:
    row = db.execute("SELECT state FROM pgoutbox.message_view WHERE id = %s", [message_id]).fetchone()
    return row == ("sent",)


def attempts(begun: Path, ids: Sequence[int]) -> list[str]:
    """Return the attempts of these messages that have begun."""
    return [line for line in begun.read_text().splitlines() if int(line.split()[0]) in ids]


def test_a_suspect_that_hangs_past_its_timeout_does_not_keep_another_suspect_from_beginning(
    db: psycopg.Connection, start_worker: StartWorker, begun: Path
) -> None:
    with db.transaction():
        hanging, other = enqueue(db, "hangs", max_attempts=2), enqueue(db, "recovers", max_attempts=2)
    environment = {"BEGUN": str(begun)}
    first = start_worker(APPLICATION, environment=environment, concurrency="4")
    wait_until(lambda: len(attempts(begun, [hanging, other])) == 2, lambda: first.log)
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    # In a lease of its own, the hanging attempt stays in flight for longer than this test waits.
    second = start_worker(APPLICATION, environment=environment, concurrency="4", lease_seconds="600")
    wait_until(lambda: is_sent(db, other), lambda: f"{begun.read_text()} {second.log}")
    wait_until(lambda: attempts(begun, [hanging])[1:] == [f"{hanging} 2"], lambda: second.log)


@pytest.mark.xfail(strict=True, reason="a claim does not record which of its messages have begun")
def test_messages_that_their_dead_worker_had_claimed_and_not_begun_begin_together(
    db: psycopg.Connection, start_worker: StartWorker, begun: Path
) -> None:
    with db.transaction():
        enqueue(db, "crashes", max_attempts=1)
        ids = [enqueue(db, "stays", max_attempts=2) for _ in range(19)]
    environment = {"BEGUN": str(begun)}
    first = start_worker(APPLICATION, environment=environment, concurrency="20")
    first.wait()
    assert attempts(begun, ids) == []
    second = start_worker(APPLICATION, environment=environment, concurrency="20", lease_seconds="600")
    wait_until(lambda: attempts(begun, ids), lambda: second.log)
    # Meanwhile the worker begins new messages, one after the other: it has slots, and looks for messages.
    for _ in range(20):
        message_id = enqueue(db, "works")
        wait_until(lambda: is_sent(db, message_id), lambda: second.log)  # noqa: B023 - called at once
    assert len(attempts(begun, ids)) == len(ids)
