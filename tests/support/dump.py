"""Programs of PostgreSQL that people use: a dump for a backup, and a script in psql."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import psycopg

from pgoutbox import embedded
from tests.support.missing import server_missing


def dump_of(dsn: str, *options: str) -> str:
    """Return the rows of all tables of the schema, or what other options of pg_dump choose."""
    return _run("pg_dump", dsn, "--schema=pgoutbox", *(options or ("--data-only",)))


def run_script(dsn: str, script: str) -> None:
    """Run a script in psql, which stops at its first error."""
    _run("psql", dsn, "--no-psqlrc", "--quiet", "--set=ON_ERROR_STOP=1", stdin=script)


def _run(name: str, dsn: str, *options: str, stdin: str = "") -> str:
    """Run a program of the server's version, or of a later one, and return its output."""
    with psycopg.connect(dsn) as connection:
        major = connection.info.server_version // 10_000
    candidates = [
        Path(f"/usr/lib/postgresql/{major}/bin/{name}"),
        embedded._package_directory() / embedded._INSTALLATION / "bin" / name,
        Path(shutil.which(name) or os.devnull),
    ]
    for program in filter(Path.is_file, candidates):
        (version,) = re.findall(rb"PostgreSQL\) (\d+)", subprocess.check_output([program, "--version"]))
        if int(version) >= major:
            break
    else:
        server_missing(f"there is no {name} of PostgreSQL {major}")
    command = [str(program), *options, dsn]
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout
