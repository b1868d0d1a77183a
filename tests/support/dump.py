"""A dump of the schema, as a person would make it for a backup."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import psycopg

from pgoutbox import embedded
from tests.support.missing import server_missing


def dump_of(dsn: str) -> str:
    """Return the rows of all tables of the schema, by pg_dump of the server's version."""
    with psycopg.connect(dsn) as connection:
        major = connection.info.server_version // 10_000
    candidates = [
        Path(f"/usr/lib/postgresql/{major}/bin/pg_dump"),
        embedded._package_directory() / embedded._INSTALLATION / "bin" / "pg_dump",
        Path(shutil.which("pg_dump") or os.devnull),
    ]
    for program in filter(Path.is_file, candidates):
        (version,) = re.findall(rb"PostgreSQL\) (\d+)", subprocess.check_output([program, "--version"]))
        if int(version) >= major:
            break
    else:
        server_missing(f"there is no pg_dump of PostgreSQL {major}")
    dumped = subprocess.run(
        [program, "--data-only", "--schema=pgoutbox", dsn], capture_output=True, text=True, check=True, timeout=60
    )
    return dumped.stdout
