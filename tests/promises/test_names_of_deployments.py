"""Names of deployments and workers: a clone of a named deployment sends nothing, and each run has a name of its own."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING, Final

import psycopg
import pytest

from pgoutbox import Context, Message, Outbox, Worker
from tests.support.command_line import Done, run_on_terminal, run_process
from tests.support.outbox_actions import enqueue, settings_for
from tests.support.waiting import until
from tests.support.worker_process import environment_with

if TYPE_CHECKING:
    from pathlib import Path


HINT: Final = "this deployment has no name"


def name_in(dsn: str) -> str | None:
    with psycopg.connect(dsn) as connection:
        ((name,),) = connection.execute("SELECT deployment FROM pgoutbox.home").fetchall()
        return name  # type: ignore[no-any-return]


def test_migrate_asks_for_the_name_of_a_new_deployment_on_a_terminal(empty_dsn: str) -> None:
    done = run_on_terminal("migrate", dsn=empty_dsn, keys="production\n")
    assert "Name of this deployment" in done.out
    assert "only workers with PGOUTBOX_DEPLOYMENT=production send" in done.out
    assert (done.exit_code, name_in(empty_dsn)) == (0, "production")
    again = run_on_terminal("migrate", dsn=empty_dsn, PGOUTBOX_DEPLOYMENT="production")
    assert "Name of" not in again.out
    assert (again.exit_code, name_in(empty_dsn)) == (0, "production")


def test_migrate_takes_no_name_for_an_answer_and_refuses_a_line_that_is_none(empty_dsn: str) -> None:
    pasted = run_on_terminal("migrate", dsn=empty_dsn, keys="python shop.py 7 ada@example.org\n")
    assert pasted.exit_code == 2
    done = run_on_terminal("migrate", dsn=empty_dsn, keys="\n")
    assert HINT in done.out
    assert (done.exit_code, name_in(empty_dsn)) == (0, None)


def test_migrate_in_a_script_hints_at_the_name_or_records_the_one_that_it_gets(empty_dsn: str) -> None:
    done = run_process("migrate", dsn=empty_dsn)
    assert HINT in done.err
    assert (done.exit_code, name_in(empty_dsn)) == (0, None)
    # Workers that run may have no name yet: only `adopt` names a schema that exists.
    done = run_process("migrate", "--deployment", "production", dsn=empty_dsn)
    assert "PGOUTBOX_DEPLOYMENT to production for all workers; then run: pgoutbox adopt" in done.err
    assert (done.exit_code, name_in(empty_dsn)) == (0, None)


@pytest.mark.parametrize("way", ["option", "environment"])
def test_a_clone_of_a_deployment_that_migrate_has_named_sends_nothing(empty_dsn: str, way: str) -> None:
    if way == "option":
        done = run_process("migrate", "--deployment", "production", dsn=empty_dsn)
    else:
        done = run_process("migrate", dsn=empty_dsn, PGOUTBOX_DEPLOYMENT="production")
    assert (done.exit_code, name_in(empty_dsn)) == (0, "production")
    assert HINT not in done.err
    with psycopg.connect(empty_dsn) as connection:
        enqueue(connection, "mail.welcome")
    for environment in ({"PGOUTBOX_DEPLOYMENT": "staging"}, {}):
        done = run("worker", "--app", "tests.support.app:outbox", "--once", dsn=empty_dsn, **environment)
        assert done.exit_code == 1
        assert "belongs to deployment production" in done.err
    with psycopg.connect(empty_dsn) as connection:
        assert connection.execute("SELECT state, attempt_count FROM pgoutbox.message").fetchall() == [("pending", 0)]


def test_the_doctor_warns_of_a_deployment_that_sends_mail_and_has_no_name(dsn: str) -> None:
    smtp = {"PGOUTBOX_SMTP_HOST": "localhost", "PGOUTBOX_SMTP_SENDER": "club@club.test"}
    assert not is_warned(dsn)
    assert is_warned(dsn, **smtp)
    assert not is_warned(dsn, PGOUTBOX_MAIL_TRANSPORT="log", **smtp)
    with psycopg.connect(dsn) as connection:
        connection.execute("SELECT pgoutbox.enqueue('mail', '{}', destination => 'mailto:ada@example.org')")
    assert is_warned(dsn)
    assert run("adopt", "--yes", dsn=dsn, PGOUTBOX_DEPLOYMENT="production").exit_code == 0
    assert not is_warned(dsn, PGOUTBOX_DEPLOYMENT="production", **smtp)


def is_warned(dsn: str, **environment: str) -> bool:
    return "deployment-unnamed" in run("doctor", "--json", dsn=dsn, **environment).out


def run(*arguments: str, dsn: str, **environment: str) -> Done:
    return run_process(*arguments, dsn=dsn, stdin=b"", **environment)


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
