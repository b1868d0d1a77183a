"""Tests that the commands of docs/how-to/migrations.md for a schema of its own work in a shell.

Those for Alembic are in `test_alembic.py`.
"""

from __future__ import annotations

import os
import re
import subprocess
from typing import TYPE_CHECKING, Final

import psycopg
import pytest

from pgoutbox import migrate
from tests.support.catalog import catalog
from tests.support.dump import run_script
from tests.support.forks import LIBRARIES, forks, without_settings
from tests.support.pages import DOCS, blocks_of
from tests.support.waiting import PROCESS_PATIENCE_SECONDS

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Server

pytestmark = pytest.mark.slow

PAGE: Final = DOCS / "how-to/migrations.md"
BEGINNING: Final = blocks_of(PAGE, "sh")[0].text
DSN: Final = "postgresql://owner@localhost/club"
COMMANDS: Final = re.findall(r"^\| .* \| `(pgoutbox migrate.*)` \|$", PAGE.read_text(), re.MULTILINE)


def test_the_commands_of_the_page_work(tmp_path: Path, empty_dsn: str, dsn: str, server: Server) -> None:
    (tmp_path / "pgoutbox").write_text(f"#!/bin/sh\n{forks(*LIBRARIES).script('-m', 'pgoutbox')}")
    (tmp_path / "pgoutbox").chmod(0o700)
    variables = without_settings(os.environ) | {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}

    def type_in(*lines: str) -> str:
        done = subprocess.run(
            ["bash", "-ec", "\n".join((*exports, *lines))],
            cwd=tmp_path,
            env=variables,
            capture_output=True,
            text=True,
            timeout=PROCESS_PATIENCE_SECONDS,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    install, *exports, first = BEGINNING.replace(DSN, f"'{empty_dsn}'").splitlines()
    assert (install, first) == ("pip install pgoutbox", "pgoutbox migrate")  # It is installed here.
    assert type_in(first) == "schema pgoutbox: base -> pgoutbox_0001\n"
    with psycopg.connect(empty_dsn) as connection:
        assert connection.execute("SELECT deployment FROM pgoutbox.home").fetchone() == ("production",)
    assert catalog(empty_dsn) == catalog(dsn)

    # tests/cli/test_databases.py runs the third one.
    current, plan, _, script, steps, indexes, grants, removal = COMMANDS
    assert type_in(current) == "pgoutbox_0001 (up to date)\n"
    assert type_in(plan) == "schema pgoutbox: up to date\n"
    assert type_in(script) == ""
    with server.database() as other:
        run_script(server.dsn_for(other), (tmp_path / "pgoutbox.sql").read_text())
        assert catalog(server.dsn_for(other)) == catalog(dsn)
        assert migrate.state(server.dsn_for(other)) == ("pgoutbox_0001", "pgoutbox", None)
    assert type_in(steps) == ""
    run_script(empty_dsn, (tmp_path / "steps.sql").read_text())  # It has none yet.
    assert type_in(indexes) == "large indexes of the next revision: all exist\n"
    assert type_in(grants) == "roles of pgoutbox: all exist and have their rights\n"
    assert type_in(f"{removal} --yes") == "schema pgoutbox: pgoutbox_0001 -> base\n"
    assert migrate.state(empty_dsn) == (None, None, None)
