"""A dump of the schema, as a person would make it for a backup."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import psycopg

from pgoutbox import embedded


def dump_of(dsn: str) -> str:
    """Return the rows of all tables of the schema, by pg_dump of the server's version."""
    with psycopg.connect(dsn) as connection:
        major = connection.info.server_version // 10_000
    candidates = [
        Path(f"/usr/lib/postgresql/{major}/bin/pg_dump"),
        embedded._package_directory() / embedded._INSTALLATION / "bin" / "pg_dump",
        Path(shutil.which("pg_dump") or os.devnull),
    ]
    program = next(candidate for candidate in candidates if candidate.is_file())
    dumped = subprocess.run(
        [program, "--data-only", "--schema=pgoutbox", dsn], capture_output=True, text=True, check=True, timeout=60
    )
    return dumped.stdout
