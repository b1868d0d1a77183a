"""Two releases as installed packages: this one, and a made-up 0.2.0 with a change of each kind.

The later one has a new column of messages, an index on it, changed functions, a new option, a claim that reads the new
column, and needs its own schema. It changes the files of this package by replacing texts that must occur once.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.support.pages import ROOT

LATER: Final = "0.2.0"

_REVISION: Final = """
from pathlib import Path

from alembic import op
from sqlalchemy import DDL

from pgoutbox.migrate import FORGET_REVISION, LOCK_MESSAGES, is_applied_by_another_run, note_revision

revision = "pgoutbox_0002"
down_revision = "pgoutbox_0001"

SQL = Path(__file__).resolve().parents[1]
CHANGED = ("_enqueue", "_enqueue_receipt")


def run(text):
    op.execute(DDL(text.replace("%", "%%")))


def replace_functions(folder):
    for name in CHANGED:
        run((folder / f"{name}.sql").read_text().replace("CREATE FUNCTION", "CREATE OR REPLACE FUNCTION", 1))


def upgrade():
    if is_applied_by_another_run(revision, down_revision):
        return
    run(LOCK_MESSAGES)
    run("ALTER TYPE pgoutbox.draft ADD ATTRIBUTE campaign text")
    run("ALTER TABLE pgoutbox.message ADD COLUMN campaign text")
    run("CREATE INDEX message_campaign ON pgoutbox.message (campaign) WHERE campaign IS NOT NULL")
    replace_functions(SQL / "sql_0002")
    run(note_revision(2, lowest_package="0.1"))


def downgrade():
    # The column stays: a call that began with the later functions would not find it.
    run(FORGET_REVISION)
    replace_functions(SQL / "sql" / "functions")
"""


@dataclass(frozen=True, slots=True)
class Release:
    """An installed package: its version, and the folder to put on Python's path."""

    version: str
    path: Path


def install(directory: Path, version: str) -> Release:
    """Copy this package into a new folder, under this version."""
    path = directory / f"pgoutbox-{version}"
    shutil.copytree(ROOT / "pgoutbox", path / "pgoutbox", ignore=shutil.ignore_patterns("__pycache__"))
    facts = path / f"pgoutbox-{version}.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text(f"Metadata-Version: 2.4\nName: pgoutbox\nVersion: {version}\n")
    (facts / "RECORD").touch()
    return Release(version, path)


def install_later(directory: Path) -> Release:
    """Make the later release."""
    release = install(directory, LATER)
    package = release.path / "pgoutbox"
    functions, added = package / "migrations" / "sql" / "functions", package / "migrations" / "sql_0002"
    added.mkdir()
    for name, given in (("_enqueue", "d"), ("_enqueue_receipt", "options")):
        target = added / f"{name}.sql"
        shutil.copy(functions / target.name, target)
        _replace(
            target, "attempt_budget, headers, payload_version", "attempt_budget, headers, campaign, payload_version"
        )
        _replace(target, f"{given}.headers, coalesce(", f"{given}.headers, {given}.campaign, coalesce(")
    (package / "migrations" / "versions" / "0002_campaigns.py").write_text(_REVISION)
    _replace(
        package / "database" / "server.py", "REQUIRED_SCHEMA_VERSION: Final = 1", "REQUIRED_SCHEMA_VERSION: Final = 2"
    )
    options = package / "options.py"
    _replace(options, '    "headers": check_headers,\n', '    "headers": check_headers,\n    "campaign": check_key,\n')
    _replace(
        options,
        "    destination: str | None\n    coalesce",
        "    campaign: str | None\n    destination: str | None\n    coalesce",
    )
    claim = package / "kernel" / "sql" / "claim.sql"
    _replace(claim, "j.lane, m.payload_version\n", "j.lane, m.payload_version, m.campaign\n")
    _replace(claim, "j.queue, NULL, 3,\n    NULL\n", "j.queue, NULL, 3,\n    NULL, NULL\n")
    lapsed = package / "kernel" / "sql" / "lapsed.sql"
    _replace(lapsed, "m.lane, m.payload_version,\n", "m.lane, m.payload_version, m.campaign,\n")
    _replace(lapsed, "    f.payload_version\n", "    f.payload_version, f.campaign\n")
    _replace(
        package / "database" / "store.py",
        "    payload_version: int = 1\n",
        "    payload_version: int = 1\n    campaign: str | None = None\n",
    )
    _replace(
        package / "message.py",
        "    content: JsonValue = None\n    payload_version: int = 1\n",
        "    content: JsonValue = None\n    payload_version: int = 1\n    campaign: str | None = None\n",
    )
    _replace(
        package / "worker" / "loader.py",
        "            row.payload_version,\n",
        "            row.payload_version,\n            row.campaign,\n",
    )
    return release


def _replace(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    if text.count(old) != 1:
        raise ValueError(f"{path.name}: {text.count(old)} times, not once: {old}")
    path.write_text(text.replace(old, new))
