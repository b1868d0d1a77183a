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
from tests.frozen.dump import lost, restore, rows_of
from tests.rehearsal.release import LATER, Release, install_both
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


@pytest.fixture(scope="module")
def releases(tmp_path_factory: pytest.TempPathFactory) -> tuple[Release, Release]:
    """Build and install both releases once."""
    return install_both(tmp_path_factory.mktemp("releases"))


@pytest.mark.parametrize("is_pooled", [False, True], ids=["direct", "pooled"])
def test_nothing_is_lost_or_fails_during_an_upgrade_and_the_way_back(
    empty_dsn: str, server: Server, tmp_path: Path, releases: tuple[Release, Release], is_pooled: bool
) -> None:
    if is_pooled:
        with pooled(empty_dsn, server, mode="transaction", size=30) as pooled_dsn:
            facts = rehearse(pooled_dsn, tmp_path, releases, seconds=6, seed=7)
    else:
        facts = rehearse(empty_dsn, tmp_path, releases, seconds=6, seed=7)
    assert {name: facts[name] for name in BROKEN if facts.get(name)} == {}, facts
    assert facts["a later worker on the earlier schema"] == "exit code 1"
    assert facts["warned of the former name"] == [LATER]
    assert facts["handed over by"].keys() == {pgoutbox.__version__, LATER}


def test_the_later_release_brings_the_frozen_dump_forward(
    empty_dsn: str, tmp_path: Path, releases: tuple[Release, Release]
) -> None:
    _, later = releases
    restore(empty_dsn)
    with psycopg.connect(empty_dsn, autocommit=True) as db:
        before = rows_of(db)
        Fleet(empty_dsn, tmp_path, 0).migrate(later)
        assert lost(before, rows_of(db)) == []
        campaigns = "SELECT count(*) FROM pgoutbox.message WHERE campaign IS NULL"
        assert db.execute(campaigns).fetchone() == (len(before["pgoutbox.message"]),)
        assert migrate.current(empty_dsn) == "pgoutbox_0003"


def test_the_plan_of_a_migration_names_locks_and_sizes_and_changes_nothing(
    empty_dsn: str, tmp_path: Path, releases: tuple[Release, Release]
) -> None:
    first, later = releases
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
    builds = [step for step in steps if "CONCURRENTLY" in step["statement"]]
    assert {"pgoutbox.message_live", "pgoutbox.message_failed"} < {step["relation"] for step in builds}
    assert {step["lock"] for step in builds} == {"SHARE UPDATE EXCLUSIVE"}
    assert [(step["relation"], step["lock"]) for step in steps if step not in builds] == [
        ("pgoutbox.message", "ACCESS EXCLUSIVE"),
        ("pgoutbox.message", "ACCESS EXCLUSIVE"),
        ("pgoutbox.worker", "SHARE"),
        ("pgoutbox.message", "SHARE"),
        ("pgoutbox.worker", "SHARE"),
    ]
    assert all(step["size_bytes"] > 0 for step in steps)
    assert {step["seconds"] for step in steps} == {0}  # It is empty.
    assert migrate.current(empty_dsn) == "pgoutbox_0001"
    assert run(later, "--plan").splitlines()[0].split("\t")[:2] == ["relation", "lock"]


def test_a_later_package_on_an_earlier_schema_enqueues_and_names_the_migration(
    empty_dsn: str, tmp_path: Path, releases: tuple[Release, Release]
) -> None:
    migrate.upgrade(empty_dsn)
    _, later = releases
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
