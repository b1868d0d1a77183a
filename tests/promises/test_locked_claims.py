"""Whatever a session has locked, no message of a live worker begins twice at once."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.outbox_actions import enqueue
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    import psycopg

    from tests.conftest import Connect
    from tests.promises.conftest import StartWorker

# Each attempt leaves a file. It ends when the test says so.
APPLICATION = """
    import asyncio
    import os

    from pgoutbox import Outbox

    outbox = Outbox()
    directory = os.environ["BEGUN"]


    @outbox.handler("works")
    async def works(message, ctx):
        open(f"{directory}/{message.id}-{message.attempt_count}", "w").close()
        while not os.path.exists(f"{directory}/go-on"):
            await asyncio.sleep(0.05)


    @outbox.handler("ticks")
    async def ticks(message, ctx):
        pass
"""


@pytest.mark.parametrize(
    "statements",
    [
        ["SELECT FROM pgoutbox.claim FOR SHARE"],
        ["SET CONSTRAINTS ALL IMMEDIATE", "SELECT pgoutbox.release('{1}')"],
        ["SELECT pgoutbox.release('{1}')", "SET CONSTRAINTS ALL IMMEDIATE"],
    ],
    ids=["share lock", "release after constraints", "release before constraints"],
)
def test_no_attempt_begins_twice_beside_an_open_transaction(
    db: psycopg.Connection, connect: Connect, start_worker: StartWorker, tmp_path: Path, statements: list[str]
) -> None:
    begun = tmp_path / "begun"
    begun.mkdir()
    ids = [enqueue(db, "works", ordering_key=str(n)) for n in range(4)]
    environment = {"BEGUN": str(begun)}
    settings = {"lease_seconds": "2", "poll_interval_seconds": "1"}
    owner = start_worker(APPLICATION, environment=environment, **settings)
    wait_until(lambda: len([*begun.iterdir()]) == len(ids), lambda: owner.log)
    opened, other = connect(), start_worker(APPLICATION, environment=environment, **settings)
    wait_until(lambda: db.execute("SELECT count(*) FROM pgoutbox.worker_view").fetchone() == (2,), lambda: other.log)
    for statement in statements:
        opened.execute(statement.encode())

    def has_passed(seconds: int) -> bool:
        return db.execute("SELECT now() > %s + make_interval(secs => %s)", [began_at, seconds]).fetchone() == (True,)

    # Three leases later the other worker has looked for lapsed attempts several times.
    ((began_at,),) = db.execute("SELECT now()").fetchall()
    wait_until(lambda: has_passed(6), lambda: other.log)
    tick = enqueue(db, "ticks")
    sent = "SELECT state = 'sent' FROM pgoutbox.message_view WHERE id = %s"
    wait_until(lambda: db.execute(sent, [tick]).fetchone() == (True,), lambda: owner.log + other.log)
    assert sorted(path.name for path in begun.iterdir()) == sorted(f"{message_id}-1" for message_id in ids)
    opened.rollback()
    (begun / "go-on").touch()
    all_sent = "SELECT bool_and(state = 'sent') FROM pgoutbox.message_view"
    wait_until(lambda: db.execute(all_sent).fetchone() == (True,), lambda: owner.log + other.log)


def test_a_release_without_triggers_lets_another_attempt_begin(
    db: psycopg.Connection, connect: Connect, start_worker: StartWorker, tmp_path: Path
) -> None:
    """The session of a replication, or of a restore, fires no trigger."""
    begun = tmp_path / "begun"
    begun.mkdir()
    message_id = enqueue(db, "works")
    settings = {"lease_seconds": "1", "poll_interval_seconds": "1", "concurrency": "1"}
    owner = start_worker(APPLICATION, environment={"BEGUN": str(begun)}, **settings)
    wait_until((begun / f"{message_id}-1").exists, lambda: owner.log)
    with db.transaction():
        db.execute("SET LOCAL session_replication_role = replica")
        db.execute("SELECT pgoutbox.release(%s)", [[message_id]])
    assert db.execute("SELECT count(*) FROM pgoutbox.claim WHERE NOT isfinite(lease_expires_at)").fetchone() == (0,)
    other = start_worker(APPLICATION, environment={"BEGUN": str(begun)}, **settings)
    wait_until((begun / f"{message_id}-2").exists, lambda: other.log)
