"""Promises about clones: a deployment with a name sends nothing from the clone of its server.

`tests/faults/test_copies.py` clones real servers. Here the clone is told by its setting.
"""

from __future__ import annotations

from typing import Final

import psycopg
import pytest

from tests.support.command_line import Done, run_on_terminal, run_process
from tests.support.outbox_actions import enqueue

pytestmark = pytest.mark.slow

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
