"""Tests an upgrade to a made-up later release, and the way back, while messages flow."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import psycopg
import pytest

import pgoutbox
from pgoutbox import migrate
from tests.rehearsal.release import LATER, Release, install, install_later
from tests.rehearsal.run import BROKEN, Fleet, rehearse
from tests.support.pooler import pooled

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Server

PRODUCER = """
import sys

import psycopg

from pgoutbox import Outbox

with psycopg.connect(sys.argv[1]) as connection:
    Outbox().on(connection).enqueue("mail", {})
"""

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("is_pooled", [False, True], ids=["direct", "pooled"])
def test_nothing_is_lost_or_fails_during_an_upgrade_and_the_way_back(
    empty_dsn: str, server: Server, tmp_path: Path, is_pooled: bool
) -> None:
    if is_pooled:
        with pooled(empty_dsn, server, mode="transaction", size=30) as pooled_dsn:
            facts = rehearse(pooled_dsn, tmp_path, seconds=6, seed=7)
    else:
        facts = rehearse(empty_dsn, tmp_path, seconds=6, seed=7)
    assert {name: facts[name] for name in BROKEN if facts.get(name)} == {}, facts
    assert facts["a later worker on the earlier schema"] == "exit code 1"
    assert facts["handed over by"].keys() == {pgoutbox.__version__, LATER}


def test_the_plan_of_a_migration_names_locks_and_sizes_and_changes_nothing(empty_dsn: str, tmp_path: Path) -> None:
    first, later = install(tmp_path, pgoutbox.__version__), install_later(tmp_path)
    fleet = Fleet(empty_dsn, tmp_path, 0)

    def run(release: Release, *arguments: str) -> str:
        command = [sys.executable, "-m", "pgoutbox", "migrate", *arguments]
        done = subprocess.run(
            command, env=fleet.environment(release), cwd=tmp_path, capture_output=True, text=True, check=True
        )
        return done.stdout

    assert run(first, "--plan") == "schema pgoutbox: base -> pgoutbox_0001, no lock on an existing table\n"
    with psycopg.connect(empty_dsn, autocommit=True) as db:
        assert db.execute("SELECT to_regnamespace('pgoutbox')").fetchone() == (None,)
    run(first)
    assert run(first, "--plan") == "schema pgoutbox: up to date\n"
    steps = [json.loads(line) for line in run(later, "--plan", "--json").splitlines()]
    assert [(step["relation"], step["lock"]) for step in steps] == [
        ("pgoutbox.message", "ACCESS EXCLUSIVE"),
        ("pgoutbox.message", "ACCESS EXCLUSIVE"),
        ("pgoutbox.message", "SHARE"),
        ("pgoutbox.worker", "SHARE"),
    ]
    assert all(step["size_bytes"] > 0 for step in steps)
    assert [step["seconds"] > 0 for step in steps] == [False] * 4  # It is empty.
    assert migrate.current(empty_dsn) == "pgoutbox_0001"
    assert run(later, "--plan").splitlines()[0].split("\t")[:2] == ["relation", "lock"]


def test_a_later_package_on_an_earlier_schema_enqueues_and_names_the_migration(empty_dsn: str, tmp_path: Path) -> None:
    migrate.upgrade(empty_dsn)
    later = install_later(tmp_path)
    variables = Fleet(empty_dsn, tmp_path, 0).environment(later)

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *arguments]
        return subprocess.run(command, env=variables, cwd=tmp_path, capture_output=True, text=True, check=False)

    produced = run("-c", PRODUCER, empty_dsn)
    assert produced.returncode == 0, produced.stderr
    for command in (("list",), ("worker", "--app", "tests.rehearsal.app:outbox", "--once")):
        done = run("-m", "pgoutbox", *command)
        assert done.returncode == 1
        assert "the schema pgoutbox has version 1, this package needs 2; run: pgoutbox migrate" in done.stderr
    assert run("-m", "pgoutbox", "migrate").returncode == 0
    assert "\tmail\t" in run("-m", "pgoutbox", "list").stdout
